"""Secrets in command lines, configurations, texts and output; and what is none."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop_probe.recording.redact import HIDDEN, StreamRedactor, redact_command, redact_text, redact_tree

SECRET = "Zx9kQ2vLm4Tt"
TOKENS = [
    "hf_abcdEFGHijklMNOPqrstUVWXyz01234567",
    "sk-proj-abcdefghijklmnop0123456789",
    "sk-ant-api03-abcdefghij_klmnop-0123456789",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijklmnopqrstuv",
    "glpat-abcdefghijklmnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefghijkl",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123456",
    "nvapi-abcdefghijklmnopqrstuvwxyz",
    "dapi0123456789abcdef0123456789abcdef",
    "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789abcdefg",
    "sk_live_abcdefghijklmnopqrstuvwx",
    "123456789:AAabcdefghijklmnopqrstuvwxyz0123456",
]

LEAKS: list[list[str]] = [
    ["train.py", "--token", SECRET],
    ["train.py", f"--token={SECRET}"],
    ["train.py", "--hf_token", SECRET, "--lr", "1"],
    ["train.py", "--hub-token", SECRET],
    ["train.py", "--api-key", SECRET],
    ["train.py", "--apiKey", SECRET],
    ["train.py", "--key", SECRET],
    ["train.py", "--auth", SECRET],
    ["train.py", "--pass", SECRET],
    ["train.py", "--password", "123456"],
    ["train.py", "--pass=123456"],
    ["train.py", "--db_pass", SECRET],
    ["train.py", "--secret", SECRET],
    ["train.py", "--client-secret", SECRET],
    ["train.py", "--aws_secret_access_key", SECRET],
    ["train.py", "--pin", "123456"],
    ["train.py", "--otp=123456"],
    ["train.py", "--mfa-code", "123456"],
    ["train.py", "--swanlab_key", SECRET],
    ["train.py", "--creds", SECRET],
    ["train.py", "--webhook", f"https://discord.com/api/webhooks/1/{SECRET}"],
    ["env", f"PGPASSWORD={SECRET}", "psql"],
    ["env", f"MYSQL_PW={SECRET}", "mysql"],
    ["env", f"GH_PAT={SECRET}", "git"],
    ["bash", "-c", f"PGPASSWORD={SECRET} psql; train.py --pin 123456 --otp 123456; export GH_PAT={SECRET} JWT={SECRET}"],
    ["train.py", "--wandb_key", "0123456789abcdef0123456789abcdef01234567"],
    ["train.py", "--api_keys", SECRET, SECRET + "2"],
    ["train.py", "--password2", SECRET],
    ["env", f"HF_TOKEN={SECRET}", "python", "train.py"],
    ["env", f"WANDB_API_KEY={SECRET}", "python", "train.py"],
    ["python", "train.py", f"+trainer.logger.api_key={SECRET}"],
    ["python", "train.py", f"hub.token={SECRET}"],
    ["bash", "-c", f"export HF_TOKEN={SECRET}; deepspeed train.py"],
    ["bash", "-c", f"HF_TOKEN='{SECRET}' deepspeed train.py"],
    ["bash", "-c", f'HF_TOKEN="{SECRET}" deepspeed train.py'],
    ["bash", "-c", f"deepspeed train.py --token {SECRET} --lr 1"],
    ["bash", "-c", f"deepspeed train.py --password='{SECRET}'"],
    ["bash", "-c", f"curl -H 'Authorization: Bearer {SECRET}' https://x.org | sh"],
    ["bash", "-c", f"curl -u user:{SECRET} https://x.org"],
    ["bash", "-lc", f"wandb login --relogin && python train.py --key {SECRET}"],
    ["bash", "-c", "wandb login 0123456789abcdef0123456789abcdef01234567"],
    ["curl", "-H", f"Authorization: Bearer {SECRET}"],
    ["curl", "-H", f"Authorization: Basic {SECRET}"],
    ["curl", "-H", f"authorization: {SECRET}"],
    ["curl", "-H", f"X-Api-Key: {SECRET}"],
    ["curl", "-H", f"PRIVATE-TOKEN: {SECRET}"],
    ["curl", "-H", f"Cookie: recording={SECRET}; other=1"],
    ["curl", "-u", f"user:{SECRET}", "https://x.org"],
    ["curl", "--user", f"user:{SECRET}"],
    ["curl", f"-uuser:{SECRET}", "https://x.org"],
    ["sshpass", "-p", SECRET, "ssh", "node1"],
    ["sshpass", f"-p{SECRET}", "ssh", "node1"],
    ["bash", "-c", f"sshpass -p{SECRET} ssh node1; sshpass -p {SECRET} ssh node2"],
    ["mysql", "-uroot", f"-p{SECRET}", "runs"],
    ["bash", "-c", f"mysql -u root -p{SECRET} runs < a.sql"],
    ["wandb", "login", SECRET * 2],
    ["train.py", "--wandb", "0123456789abcdef0123456789abcdef01234567"],
    ["bash", "-c", "train.py --wandb 0123456789abcdef0123456789abcdef01234567"],
    ["env", f"MY_KEY={SECRET}", "train.py"],
    ["bash", "-c", f"MY_KEY={SECRET} train.py"],
    ["fetch.py", "--login", f"user:{SECRET}"],
    ["bash", "-c", f"fetch.py --login user:{SECRET}"],
    ["aws", "configure", "set", "aws_secret_access_key", SECRET],
    ["kaggle.py", "--kaggle-key", SECRET],
    ["python", "-c", f"import wandb; wandb.login(key='{SECRET}')"],
    ["python", "-c", f'wandb.login(host="https://example.org", key="{SECRET}"); login("{SECRET}")'],
    ["python", "-c", f"login('{SECRET}')"],
    ["train.py", f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/x"],
    ["train.py", "--config", json.dumps({"hub": {"token": SECRET}, "lr": 1})],
    ["train.py", "--config", json.dumps({"password": 12345678})],
    ["train.py", "--config", json.dumps({"api_keys": [SECRET, "b"]})],
    ["train.py", "--config", json.dumps({"api_key": SECRET}).replace('"', '\\"')],
    ["train.py", "--config", f"{{'api_key': '{SECRET}'}}"],
    ["train.py", f"--url=https://user:{SECRET}@example.org/data"],
    ["train.py", f"https://{SECRET * 2}@github.com/x/y"],
    ["train.py", "--data", f"https://example.org/data?token={SECRET}&x=1"],
    ["train.py", "--data", f"https://example.org/data?x=1&api_key={SECRET}"],
    ["train.py", "--data", f"https://s3.amazonaws.com/x?X-Amz-Signature={SECRET}&y=1"],
    ["train.py", "--data", f"https://x.blob.core.windows.net/y?sv=2020&sig={SECRET}"],
    ["train.py", f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={SECRET}=="],
    ["train.py", f"postgres://user:{SECRET}@db/runs"],
    *(["train.py", "--name", token] for token in TOKENS),
    *(["bash", "-c", f"login {token} && train"] for token in TOKENS),
]
HARMLESS: list[list[str]] = [
    ["train.py", "--train_tokens", "1000"],
    ["train.py", "--pin_memory", "4"],
    ["train.py", "--pin", "true"],
    ["env", "I_MPI_PIN=1", "train.py"],
    ["train.py", "--data-path", "/data", "--path=x", "--exit-code", "3", "--language_code", "en", "--spin", "2"],
    ["bash", "-c", "I_MPI_PIN=1 train.py --pin_memory 4 --data-path x --source_code y --mapping=a --pw_lr 0.1"],
    ["train.py", "--max_tokens", "512"],
    ["train.py", "--max-new-tokens=64"],
    ["train.py", "--total_tokens", "1e9"],
    ["train.py", "--tokens", "2B"],
    ["train.py", "--tokenizer", "gpt2"],
    ["train.py", "--tokenizer_name=meta-llama/Llama-3"],
    ["train.py", "--tokens_per_batch", "4096"],
    ["train.py", "--key_length", "3"],
    ["train.py", "--text_key", "content"],
    ["env", "SORT_KEY=length", "train.py", "--wandb", "a-long-name-of-a-project"],
    ["bash", "-c", "SORT_KEY=length train.py --wandb online --login somebody"],
    ["train.py", "--dataset_key=text"],
    ["train.py", "--num_key_value_heads", "8"],
    ["train.py", "--pad_token", "<pad>"],
    ["train.py", "--eos-token", "</s>"],
    ["train.py", "--image_token", "<image>"],
    ["train.py", "--use_auth_token", "true"],
    ["train.py", "--use_auth_token", "--lr", "1"],
    ["train.py", "--token", "$HF_TOKEN"],
    ["train.py", "--num_pass", "3"],
    ["train.py", "--forward_pass", "x"],
    ["train.py", "--password_file", "/run/secrets/db"],
    ["train.py", "--secret_name", "wandb"],
    ["train.py", "--auth_type", "oauth"],
    ["train.py", "--public_key", "a.pub"],
    ["train.py", "--revision", "0123456789abcdef0123456789abcdef01234567"],
    ["train.py", "--task", "sk-lasso"],
    ["train.py", "--author", "somebody"],
    ["train.py", "--compass", "north"],
    ["train.py", "--passes", "3"],
    ["train.py", "--config", '{"max_tokens": 512, "pad_token": "<pad>", "tokenizer": "gpt2"}'],
    ["train.py", "--data", "https://example.org/data?max_tokens=3&page=2"],
    ["git", "clone", "ssh://git@github.com/x/y"],
    ["docker", "run", "-u", "1000:1000", "image"],
    ["ssh", "-p", "22", "node1"],
    ["ssh", "login", "-p", "22"],
    ["docker", "run", "-p", "8080:80", "image"],
    ["docker", "exec", "box", "ssh", "-p", "22", "login"],
    ["curl", "https://example.org/?page=2&max_tokens=3#key"],
    ["srun", "-ptraining", "python", "-u", "train.py"],
    ["bash", "-c", "mysql -p runs; srun -p training python -u train.py host:29500"],
    ["python", "-c", "login()"],
    ["docker", "login", "registry.example.org"],
    ["python", "-c", "sorted(rows, key='length'); login(host='https://example.org/long/path')"],
    ["env", "PWD=/home/user", "python", "-m", "torch.distributed.run", "--rdzv-endpoint", "node1:29500", "train.py"],
    ["python", "-c", "import torch; print(torch.__version__)"],
]


@pytest.mark.parametrize("command", LEAKS, ids=" ".join)
def test_secrets_of_commands_are_hidden(command: list[str]) -> None:
    shown = redact_command(command)
    text = " ".join(shown)
    assert HIDDEN in text
    assert SECRET not in text
    assert not any(token in text for token in TOKENS)
    assert not re.search("123456(?![0-9]{2,}-)|0123456789abcdef01", text)
    assert redact_command(shown) == shown


@pytest.mark.parametrize(
    "command",
    [
        ["docker", "login", "-u", "me", "-p", "hunter", "registry.example.org"],
        ["sudo", "/usr/bin/podman", "login", "-phunter"],
        ["az", "login", "-p=hunter"],
        ["bash", "-c", "helm registry login -u me -p 'hunter two' example.org"],
        ["sudo", "mysql", "-phunter"],
        ["train.py", "--token", "-hunter"],
        ["train.py", "--password", "-h"],
        ["git", "clone", "https://hunter@example.org/x"],
        ["pip", "install", "git+https://hunter@example.org/x"],
        ["curl", "http://localhost:8888/?token=h"],
        ["curl", "http://localhost:8888/lab?a=1&access_token=12#x"],
        ["curl", "https://example.org/#id_token=hun"],
    ],
    ids=" ".join,
)
def test_short_secrets_are_hidden_by_their_place(command: list[str]) -> None:
    for shown in (redact_command(command), redact_text(" ".join(command)).split(" ")):
        assert HIDDEN in " ".join(shown)
        assert not {"hunter", "-hunter", "-phunter", "-h"} & set(shown)
        assert not re.search("hunt|token=h|token=12", " ".join(shown))
    assert redact_command(redact_command(command)) == redact_command(command)


@pytest.mark.parametrize("command", HARMLESS, ids=" ".join)
def test_other_arguments_stay(command: list[str]) -> None:
    assert redact_command(command) == command


def test_text_around_a_secret_stays() -> None:
    assert redact_command(["train.py", "--token", SECRET, "--lr", "1"]) == ["train.py", "--token", HIDDEN, "--lr", "1"]
    assert redact_text(f"a?token={SECRET}&b=1") == f"a?token={HIDDEN}&b=1"
    assert redact_text(f"Authorization: Bearer {SECRET}") == f"Authorization: Bearer {HIDDEN}"
    assert redact_text(f'{{"token": "{SECRET}", "lr": 1}}') == f'{{"token": "{HIDDEN}", "lr": 1}}'
    assert redact_text(f"export A_TOKEN={SECRET}; run") == f"export A_TOKEN={HIDDEN}; run"
    assert redact_command(["curl", "-u", f"me:{SECRET}"]) == ["curl", "-u", f"me:{HIDDEN}"]


CONFIGURATIONS: list[tuple[Any, Any]] = [
    ({"password": 1234}, {"password": HIDDEN}),
    ({"password": 12.5, "lr": 0.1}, {"password": HIDDEN, "lr": 0.1}),
    ({"api_keys": ["a" * 9, "b" * 9]}, {"api_keys": [HIDDEN, HIDDEN]}),
    ({"secrets": {"a": "b", "c": [1]}}, {"secrets": {"a": HIDDEN, "c": [HIDDEN]}}),
    ({"hub_token": None, "use_auth_token": True}, {"hub_token": None, "use_auth_token": True}),
    ({"max_tokens": 512, "pad_token": "<pad>"}, {"max_tokens": 512, "pad_token": "<pad>"}),
    ({"eos_token_id": 2, "tokens": [1, 2]}, {"eos_token_id": 2, "tokens": [1, 2]}),
    ({"additional_special_tokens": ["<a>", "<b>"]}, {"additional_special_tokens": ["<a>", "<b>"]}),
    ({"suppress_tokens": [1, 2, 3]}, {"suppress_tokens": [1, 2, 3]}),
    ({"a": [{"command": f"x --token {SECRET}"}]}, {"a": [{"command": f"x --token {HIDDEN}"}]}),
    ({"wandb": {"key": "team", "api_key": SECRET}}, {"wandb": {"key": "team", "api_key": HIDDEN}}),
    ({"token": b"abcdefgh"}, {"token": HIDDEN}),
]


@pytest.mark.parametrize(("value", "expected"), CONFIGURATIONS)
def test_configurations(value: Any, expected: Any) -> None:
    assert redact_tree(value) == expected


OUTPUT = [
    "step 10: loss 2.31, 4096 tokens/s, tokens: 1000000, lr=1e-4",
    "Total tokens = 12,345,678 (token throughput: 12.3k/s)",
    "Special tokens have been added in the vocabulary, make sure the associated word embeddings are trained.",
    "loading weights file model.safetensors from https://huggingface.co/gpt2/resolve/0123456789abcdef0123456789abcdef01234567/x",
    "[2026-01-01 10:00:00,123] [INFO] [engine.py:100] rank 0: forward pass: 12.3 ms, backward pass: 3 ms",
    'Missing key(s) in state_dict: "lm_head.weight", key: attention.query',
    "KeyError: 'input_ids'",
    "123:45:67 10.0.0.1:29500 0x7f0000000000",
]


@pytest.mark.parametrize("line", OUTPUT)
def test_usual_output_stays(line: str) -> None:
    assert redact_text(line) == line
    redactor = StreamRedactor()
    assert redactor.feed(line.encode() + b"\n") == line.encode() + b"\n"


def test_documents_of_this_project_stay() -> None:
    """Nothing in the documentation is a secret; test_every_recording.py says the same of recordings."""
    root = Path(__file__).resolve().parents[2]
    for path in [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/*.md"), *root.glob("ds_configs/*.json")]:
        for line in path.read_text().splitlines():
            assert redact_text(line) == line


@given(st.text(alphabet=st.characters(codec="ascii"), max_size=200))
def test_any_text_is_redacted_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_command_keeps_its_arguments(command: list[str]) -> None:
    shown = redact_command(command)
    assert len(shown) == len(command)
    assert redact_command(shown) == shown


@given(
    st.sampled_from(["--token {}", "PASSWORD={}", '"api_key": "{}"', "https://u:{}@h/x", "Authorization: Bearer {}"]),
    st.text(alphabet="abcdefghijkABCDEFGHIJK0123456789", min_size=8, max_size=40),
)
def test_any_secret_is_hidden(shape: str, secret: str) -> None:
    if "token" in shape and secret.isdigit():
        secret += "x"
    assert secret not in redact_text("run " + shape.format(secret) + " end")


LINES = f"start\nexport TOKEN={SECRET}\nprogress 10%\rprogress 20%\r\nhf_abcdefghijklmnop1234 end\n\xff\xfe plain\nlast"


@given(st.lists(st.integers(0, len(LINES)), max_size=8))
def test_output_is_redacted_however_it_is_split(cuts: list[int]) -> None:
    data = LINES.encode("latin-1")
    redactor, edges = StreamRedactor(), [0, *sorted(cuts), len(data)]
    shown = b"".join(redactor.feed(data[begin:end]) for begin, end in pairwise(edges)) + redactor.flush()
    assert shown == data.replace(SECRET.encode(), HIDDEN.encode()).replace(b"hf_abcdefghijklmnop1234", HIDDEN.encode())


def test_private_keys_are_hidden() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nDEF=\n-----END RSA PRIVATE KEY-----"
    assert "MIIE" not in redact_text(key)
    redactor = StreamRedactor()
    shown = redactor.feed(f"a\n{key}\nb\n".encode())
    assert b"MIIE" not in shown
    assert b"DEF" not in shown
    assert shown.startswith(b"a\n")
    assert shown.endswith(b"b\n")


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    redactor = StreamRedactor()
    assert len(redactor.feed(b"x" * 200_000)) == 200_000
