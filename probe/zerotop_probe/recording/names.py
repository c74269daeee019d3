"""Names for recordings that people can say and type, such as ``brisk-otter``."""

from __future__ import annotations

import os

_ADJECTIVES = (
    "able agile amber ample apt azure bold brave brief bright brisk broad calm clear clever cool cosy crisp curious"
    " daring deft eager early easy fair fast fine firm fleet fond frank fresh gentle glad golden grand green happy"
    " hardy honest humble jolly keen kind lively loyal lucky lunar merry mild mellow modest neat nimble noble patient"
    " plain polite proud quick quiet rapid ready royal ruby rustic sharp silent silver simple sleek snowy solar solid"
    " spry steady sturdy sunny swift tidy tranquil trusty vivid warm wise witty zesty"
)
_ANIMALS = (
    "adder badger beaver bison bittern camel caracal cheetah condor coral crane cricket curlew deer dingo dolphin"
    " dove eagle egret eland elk falcon ferret finch fox gannet gazelle gecko gibbon goose grouse gull hare hawk heron"
    " hornet horse ibex ibis impala jackal jaguar kestrel kite koala lark lemur leopard linnet lion llama lynx magpie"
    " marten merlin mink moose moth newt ocelot oriole osprey otter owl panda panther parrot pelican petrel pigeon"
    " plover puffin puma quail rabbit raven robin salmon seal serval shrew skylark sparrow squid stoat stork swallow"
    " swan swift tapir tern thrush tiger toad trout turtle viper walrus weasel whale wolf wombat wren yak zebra"
)


def make_name() -> str:
    """Return a name by chance; it leaves the random state of ``random`` alone."""
    number = int.from_bytes(os.urandom(4), "big")
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    return f"{adjectives[number % len(adjectives)]}-{animals[number // 256 % len(animals)]}"
