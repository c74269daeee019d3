"""Formats of tokens that are secrets anywhere in a text, and names of values that are secret.

Formats are those of detect-secrets 1.5.0 (Yelp Inc., Apache License 2.0, plugins of the same names), which are maintained by
many, and of gitleaks 8 (Zachary Rice, MIT License) for machine-learning services that it lacks. detect-secrets itself cannot
be a dependency: this package runs in every rank and uses the standard library only, while detect-secrets brings PyYAML and
requests. It also searches the source of programs; command lines and configurations have other forms.
"""

from __future__ import annotations

import functools
import re

# By a text that every such token contains. Lengths are the least that the services use, or less.
_FORMATS = {
    # detect-secrets
    "A3T": r"A3T[A-Z0-9]{13,17}",
    **dict.fromkeys(("ABIA", "ACCA", "AKIA", "ASIA"), r"(?:ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{12,16}"),
    "AKC": r"AKC[a-zA-Z0-9]{10,}",
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9_]{16,}"),
    **dict.fromkeys(("glpat-", "gldt-", "glft-", "glrt-", "glptt-"), r"gl(?:pat|dt|ft|rt|ptt)-[A-Za-z0-9_\-]{12,}"),
    **dict.fromkeys(
        ("glsoat-", "glcbt-", "glimt-", "glagent-", "gloas-"), r"gl(?:soat|cbt|imt|agent|oas)-[A-Za-z0-9_\-]{12,}"
    ),
    "GR1348941": r"GR1348941[A-Za-z0-9_\-]{20,50}",
    "eyJ": r"eyJ[A-Za-z0-9\-_=]{8,4000}\.[A-Za-z0-9\-_=]{8,4000}(?:\.[A-Za-z0-9\-_.+/=]*)?",
    "-us": r"[0-9a-z]{32}-us[0-9]{1,2}",
    "npm_": r"npm_[A-Za-z0-9]{30,}",
    "sk-": r"sk-[A-Za-z0-9_\-]{12,}",
    "pypi-": r"pypi-[A-Za-z0-9\-_]{16,}",
    "SG.": r"SG\.[a-zA-Z0-9_-]{16,}\.[a-zA-Z0-9_-]{16,}",
    "xox": r"xox[abeoprs]-[A-Za-z0-9-]{8,}",
    "hooks.slack": r"(?<=hooks\.slack\.com/services/)T[a-zA-Z0-9_]+/B[a-zA-Z0-9_]+/[a-zA-Z0-9_]+",
    "sq0": r"sq0[a-z]{3}-[0-9A-Za-z\-_]{22,43}",
    "k_live_": r"[rs]k_live_[0-9a-zA-Z]{16,}",
    ":AA": r"\d{8,10}:AA[0-9A-Za-z_-]{33}",
    # gitleaks
    "hf_": r"hf_[A-Za-z0-9]{8,}",
    "api_org_": r"api_org_[A-Za-z0-9]{16,}",
    "github_pat_": r"github_pat_\w{16,}",
    "xapp-": r"xapp-\d-[A-Z0-9]+-\d+-[a-f0-9]+",
    "AIza": r"AIza[\w-]{35}",
    "ya29.": r"ya29\.[\w-]{16,}",
    "dapi": r"dapi[a-f0-9]{32}(?:-\d)?",
    "_v1_": r"(?:do[opr]_v1_[a-f0-9]{64}|wandb_v1_\w{16,})",
    "nvapi-": r"nvapi-[\w-]{16,}",
    "gsk_": r"gsk_[A-Za-z0-9]{20,}",
    "r8_": r"r8_[A-Za-z0-9]{30,}",
    "wandb login": r"(?<=wandb login )[0-9a-f]{40}",
    "--wandb": r"(?<=--wandb[ =])[0-9a-f]{40}",
    "lin_api_": r"lin_api_[A-Za-z0-9]{40}",
    "hvs.": r"hvs\.[\w-]{24,}",
    "tskey-": r"tskey-[\w-]{16,}",
}
TOKENS = {hint: re.compile(rf"(?<![A-Za-z0-9_-])(?:{pattern})(?![A-Za-z0-9_])") for hint, pattern in _FORMATS.items()}
"""Patterns of tokens whose format says that they are secrets, by a text that each contains, which is found much faster."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _collect_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _collect_words("password passwd passphrase pwd secret credential apikey passcode")
_PASSWORD_ENDINGS = ("password", "passwd", "sshpass", "userpw")  # also PGPASSWORD, which is one word
_LAST_WORDS = _collect_words("otp totp jwt pat pw psw passkey cred webhook")
_WHOLE_NAMES = _collect_words("authorization bearer cookie sig sas pin mfa")
_SIGNERS = _collect_words("amz goog")  # of URLs
# Words after those, in names of values that only describe a secret.
_ABOUT = _collect_words(
    """file path dir folder name id length len type kind size policy store manager field column env var variable url uri
    host min max count format provider scope expiry ttl required enabled version prefix suffix arn ref hint prompt"""
)
_KEY_OWNERS = _collect_words(
    """api access secret private auth account service client db database encryption signing license master session app
    application storage consumer shared subscription admin deploy hub hf huggingface wandb comet neptune openai anthropic
    aws azure gcp google ssh rsa kaggle clearml replicate mistral cohere groq gemini runpod together fireworks lambda vast
    swanlab mlflow dagshub deepseek dashscope perplexity modelscope minio s3"""
)
# Variables of the environment that end in KEY hold secrets, except these.
_PLAIN_KEYS = _collect_words("primary foreign public sort cache group partition join index text image label row column")
_CODE_OWNERS = _collect_words("mfa otp totp pin security verification auth recovery")
# Tokens of a text, which are no secrets: numbers of them, and their names.
_TEXT_TOKENS = _collect_words(
    """pad eos bos unk sep cls mask special new max min num n no image img audio video vision visual boi eoi stop start end
    begin suppress train trained eval test val validation total target source prompt completion output input generated gen
    context ctx draft added forced decoder encoder think thinking reasoning response instruction system assistant tool call
    batch avg mean sum extra global local per prefix suffix first last next prev virtual soft patch text label word sub
    byte seen valid ignored non warmup cached keep drop chunk packed sequence seq block sample learned placeholder fim eot
    eod human role turn loss unique all padding of and"""
)
_PASSES = _collect_words(
    """num n forward backward fwd bwd single one two multi max min first second third per data full dry high low"""
)


def split_words(name: str) -> list[str]:
    """Return the lower-case words of a name such as ``HF_TOKEN``, ``api-key`` or ``accessKey``; digits are left out."""
    return [word.lower() for word in _WORD.findall(name) if not word.isdigit()]


@functools.lru_cache(1024)
def is_secret_name(name: str) -> bool:
    """Return whether a key, variable or option of this name holds a secret."""
    words = split_words(name)
    if not words:
        return False
    last, owners = _make_singular(words[-1]), words[:-1]
    if last == "token":
        return not owners or owners[-1] not in _TEXT_TOKENS
    if last == "key":
        return bool(owners) and (owners[-1] in _KEY_OWNERS or (name.isupper() and owners[-1] not in _PLAIN_KEYS))
    if last == "pass":
        return bool(owners) and owners[-1] not in _PASSES
    if last == "code" and owners:
        return owners[-1] in _CODE_OWNERS
    if last in _LAST_WORDS or last.endswith(_PASSWORD_ENDINGS) or (len(words) == 1 and last in _WHOLE_NAMES):
        return True
    found = [place for place, word in enumerate(words) if _make_singular(word) in _SECRET_WORDS]
    if last == "signature":
        return not _SIGNERS.isdisjoint(owners)
    return bool(found) and not any(word in _ABOUT for word in words[found[-1] + 1 :])


@functools.lru_cache(1024)
def is_secret_option(name: str) -> bool:
    """Return whether the value of a command's option is a secret; more words mean one there than in a text."""
    words = split_words(name)
    return is_secret_name(name) or (len(words) > 0 and words[-1] == "auth") or words in (["key"], ["pass"])


@functools.lru_cache(1024)
def names_tokens(name: str) -> bool:
    """Return whether a name ends in "token", singular or plural: counts of tokens have such names too."""
    words = split_words(name)
    return bool(words) and _make_singular(words[-1]) == "token"


def _make_singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word
