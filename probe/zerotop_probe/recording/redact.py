"""Remove secrets from command lines, configurations, texts and output before they are recorded.

Secrets are recognized by the name beside them (``--token X``, ``PASSWORD=X``, ``"api_key": "X"``), by their place (the login
of a URL, the header Authorization) and by their format, see :mod:`~zerotop_probe.recording.secret_formats`. A single letter
such as ``-p`` has too many meanings to be one. Redacting a redacted text changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerotop_probe.recording.secret_formats import TOKENS, is_secret_name, is_secret_option, names_tokens

__all__ = ["HIDDEN", "StreamRedactor", "is_secret_name", "redact_command", "redact_text", "redact_tree"]

HIDDEN = "<redacted>"

# A text contains one of these, in lower case, if it may contain the name of a secret.
_NAME_HINTS = (
    *("token", "key", "pass", "pw", "psw", "secret", "cred", "auth", "cookie", "bearer", "sig", "sas", "jwt", "webhook"),
    *("otp", "mfa", "pin", "_pat", "-pat", "_code", "-code"),
)
# A name alone is a token for HTTP, and an account for ssh unless it is long.
_LOGIN = re.compile(
    r"(?:(?<=://)(?:[^/\s:@\"'<>]{0,99}:[^/\s@\"'<>]{1,999}|[^/\s:@\"'<>]{20,999})"
    r"|(?<=https://)[^/\s:@\"'<>]{1,19}|(?<=http://)[^/\s:@\"'<>]{1,19})(?=@)"
)
_QUERY_VALUE = re.compile(r"([?&#;]([\w.-]{1,60})=)([^\s&#;\"'<>`]+)")
_SCHEMES = r"(?:bearer|basic|token|digest|negotiate|apikey)"
_HEADER = re.compile(
    rf"\b((?:proxy-)?authorization[\"']?[ \t]*[:=][ \t]*[\"']?(?:{_SCHEMES}[ \t]+)?)(?!{_SCHEMES}\b)[^\s\"',;<]+",
    re.IGNORECASE,
)
_COOKIE = re.compile(r"\b((?:set-)?cookie[\"']?:[ \t]*)[^\s\"'<][^\r\n\"'<]*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer[ \t]+)[\w.~+/=-]{16,}", re.IGNORECASE)
_KEY_BLOCK = re.compile(r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----).*?(?=-----END|\Z)", re.DOTALL)
# The end of a name, from a hint on, and what is between it and its value. A name has at most so many characters, so that no
# text takes long.
_NAME_CHARS = 60
_NAME_END = re.compile(
    rf"(?:{'|'.join(_NAME_HINTS)})[\w-]{{0,{_NAME_CHARS}}}"
    r"(\\?[\"']?\]?[ \t]{0,9}(?::=|=>|==|=|:(?!//))[ \t]{0,9}|[ \t]{1,99})(?=\S)"
)
_VALUE = re.compile(r"\\?\"[^\"\\\r\n]*\\?\"?|'[^'\r\n]*'?|\[[^\]\r\n]*\]?|[^\s\"'`,;&|)}\]<\[]+")
# A name and its password; two numbers are the user and the group of a container.
_LOGIN_PAIR = re.compile(r"(?<!\S)([^\s:\"'=/]+:)(?!\d+(?:\s|\Z))[^\s\"'<]+")
_USER_OPTIONS = ("-u", "-U", "--user", "--proxy-user", "--login")
_USER_OPTION = re.compile(
    r"(?<![\w-])((?:(?:-u|-U|--user|--proxy-user|--login)(?:[ \t]+|=)|-u(?=[A-Za-z]))[\"']?[^\s:\"'=/]{1,99}:)"
    r"(?!\d+(?:\s|\Z))[^\s\"'<]+"
)
# A call such as wandb.login(key="..."), or with the key alone.
_LOGIN_CALL = re.compile(
    r"(\blogin\((?:[^()\n]{0,199}\b(?:key|token)[ \t]*=)?[ \t]*\\?[\"'])(?!https?:)[^\"'\\<\s]{8,}(?=\\?[\"'])"
)
_NUMBER = re.compile(r"[-+]?[\d.,_]+(?:[eE][-+]?\d+)?\s*(?:[kKmMbBgGtT](?:i?B)?|%|/s|s)?")
# Harmless values: switches, references to variables, and values that are redacted already.
_PLAIN_VALUE = re.compile(
    r"(?:true|false|yes|no|on|off|none|null|auto|default|required|bearer|basic|token|digest|negotiate|apikey"
    r"|\$.*|<.*>|\*+|[.\u2026]+)?",
    re.IGNORECASE,
)
_TEXT_TOKEN = re.compile(r"(?:<.*>|\[[A-Z]+\]|</?s>|.{1,3})")
_OPTION_NAME = re.compile(r"--?[A-Za-z]")
# Programs whose option -p has a password: sshpass in the next argument too.
_PASSWORD_PROGRAMS = ("sshpass", "mysql", "mysqldump", "mariadb")
# Likewise, after the argument "login".
_LOGIN_PROGRAMS = (
    "docker",
    "podman",
    "nerdctl",
    "buildah",
    "skopeo",
    "crane",
    "oras",
    "helm",
    "apptainer",
    "az",
    "oc",
    "cf",
)
_OTHER_PROGRAMS = ("ssh", "scp", "sftp", "rsync")  # their -p is none
_PASSWORD_OPTION = re.compile(
    r"\b(sshpass[ \t]+-p[ \t]*|(?:mysql|mysqldump|mariadb)[ \t](?:[^\n;&|]{0,200}[ \t])?-p"
    rf"|(?:{'|'.join(_LOGIN_PROGRAMS)})[ \t](?:[^\n;&|]{{0,200}}[ \t])?login[ \t](?:[^\n;&|]{{0,200}}[ \t])?-p(?:=|[ \t]*))"
    r"(?![ \t<=])(?:\"[^\"\n]*\"?|'[^'\n]*'?|[^\s;&|\"'<]+)"
)
# By what a text contains in lower case if it may match: each keeps its first group.
_LOGINS = {"-u": _USER_OPTION, "--login": _USER_OPTION, "login(": _LOGIN_CALL, "-p": _PASSWORD_OPTION}
_NAMED = {"private key": _KEY_BLOCK, "authorization": _HEADER, "bearer": _BEARER, "cookie": _COOKIE}
# Arguments after which a token stands alone.
_BARE_TOKENS = {"login": re.compile(r"[\w-]{20,}"), "--wandb": re.compile(r"[0-9a-f]{40}")}


def redact_text(text: str) -> str:
    """Return a text of any length in which apparent secrets are replaced, at 5 to 25 MB/s."""
    if "://" in text:
        if "@" in text:
            text = _LOGIN.sub(HIDDEN, text)
        text = _QUERY_VALUE.sub(_hide_query_value, text)
    text = _replace_found(text, text, TOKENS, HIDDEN)
    small = _lower_letters(text)
    text = _replace_found(text, small, _LOGINS, rf"\1{HIDDEN}")
    if not any(hint in small for hint in _NAME_HINTS):
        return text
    return _hide_named_values(_replace_found(text, small, _NAMED, rf"\1{HIDDEN}"))


def _replace_found(text: str, searched: str, patterns: Mapping[str, re.Pattern[str]], shown: str) -> str:
    """Replace the matches of those patterns whose hint is in ``searched``."""
    for hint, pattern in patterns.items():
        if hint in searched:
            text = pattern.sub(shown, text)
    return text


def _hide_query_value(match: re.Match[str]) -> str:
    """Hide a secret in the query of a URL, however short: it is no token of a text."""
    return match[1] + HIDDEN if is_secret_name(match[2]) and not _PLAIN_VALUE.fullmatch(match[3]) else match[0]


def _lower_letters(text: str) -> str:
    """Return a text of the same length in small letters."""
    small = text.lower()
    return small if len(small) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def _hide_named_values(text: str) -> str:
    shown, done, position = [], 0, 0
    small = _lower_letters(text)  # searching it takes half the time of a search that ignores case
    while match := _NAME_END.search(small, position):
        position = match.end()
        name, between = text[_find_name_begin(text, match.start()) : match.start(1)], match[1]
        is_option = name.startswith("-")
        is_secret = is_secret_option(name) if is_option else not between.isspace() and is_secret_name(name)
        found = _VALUE.match(text, position) if is_secret else None
        if found is not None and not _is_harmless(name, found[0].strip("\\\"'[] ")):
            quote = next((quote for quote in ('\\"', '"', "'") if found[0].startswith(quote)), "")
            shown += [text[done:position], quote, HIDDEN, quote if found[0].endswith(quote) else ""]
            done = position = found.end()
    return "".join([*shown, text[done:]])


def _find_name_begin(text: str, position: int) -> int:
    lowest = max(0, position - _NAME_CHARS)
    while position > lowest and (text[position - 1].isalnum() or text[position - 1] in "_-"):
        position -= 1
    return position


def _is_harmless(name: str, value: str) -> bool:
    """Return whether a value is no secret, whatever its name: a switch, a number of tokens or a token of a text."""
    if _PLAIN_VALUE.fullmatch(value):
        return True
    if names_tokens(name):
        return bool(_NUMBER.fullmatch(value) or _TEXT_TOKEN.fullmatch(value))
    return name.lstrip("-").lower() == "pwd" and value.startswith("/")  # the variable of every shell


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets, in any argument: options, ``bash -c`` strings, JSON, headers, URLs."""
    shown: list[str] = []
    option = ""  # the secret option whose value comes next
    program, has_login = "", False
    for argument in arguments:
        if option and not argument.startswith("--"):
            is_shown = _is_harmless(option, argument) or (option.endswith("s") and _OPTION_NAME.match(argument))
            shown.append(argument if is_shown else HIDDEN)
            option = option if option.endswith("s") and not argument.endswith(".py") else ""
            continue
        if (name := os.path.basename(argument)) in (*_PASSWORD_PROGRAMS, *_LOGIN_PROGRAMS, *_OTHER_PROGRAMS):
            program, has_login = name, False
        has_login |= argument == "login"
        name, equals, value = argument.partition("=")
        is_name = " " not in name and "://" not in name and not name.startswith(("{", "["))
        option = argument if not equals and _precedes_secret(argument, program, has_login) else ""
        if _is_password_option(program, has_login) and argument.startswith("-p") and len(argument) > 2:
            shown.append(f"-p{HIDDEN}")
        elif shown and (pattern := _BARE_TOKENS.get(shown[-1])) and pattern.fullmatch(argument):
            shown.append(HIDDEN)
        elif (
            equals
            and is_name
            and (is_secret_option(name) if name.startswith("-") else is_secret_name(name.rpartition(".")[2]))
        ):
            shown.append(argument if _is_harmless(name, value) else f"{name}={HIDDEN}")
        elif shown and shown[-1] in _USER_OPTIONS:
            shown.append(_LOGIN_PAIR.sub(rf"\1{HIDDEN}", redact_text(argument)))
        else:
            shown.append(redact_text(argument))
    return shown


def _is_password_option(program: str, has_login: bool) -> bool:
    """Return whether ``-p`` takes a password here."""
    return program in _PASSWORD_PROGRAMS or (program in _LOGIN_PROGRAMS and has_login)


def _precedes_secret(argument: str, program: str, has_login: bool) -> bool:
    """Return whether the next argument is a secret."""
    if argument.startswith("-"):
        is_password = argument == "-p" and (program == "sshpass" or (program in _LOGIN_PROGRAMS and has_login))
        return is_password or (" " not in argument and is_secret_option(argument))
    return "_" in argument and argument.isidentifier() and is_secret_name(argument)  # aws configure set NAME VALUE


def redact_tree(value: Any, name: str = "") -> Any:
    """Return a configuration without the values of secret keys, at any depth: texts, numbers and lists of them."""
    if name and is_secret_name(name):
        return _hide_leaves(value, name)
    if isinstance(value, dict):
        return {str(key): redact_tree(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def _hide_leaves(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {str(key): _hide_leaves(inner, name) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide_leaves(inner, name) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return value if _is_harmless(name, text) else HIDDEN


class StreamRedactor:
    """Redacts output that arrives in pieces, whole lines at a time: a secret may be split between two pieces.

    ``feed`` keeps the last, unfinished line until its rest arrives; call ``flush`` at the end of the output, and after a
    short silence for prompts and progress bars, which end without a newline. Bytes that are no UTF-8 stay as they are.
    """

    def __init__(self) -> None:
        self._held = b""
        self._is_in_key = False  # inside a private key of several lines

    def feed(self, data: bytes) -> bytes:
        """Return the redacted lines that are finished now."""
        data = self._held + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _MAX_HELD_BYTES:
            end = len(data)
        self._held = data[end:]
        return self._redact(data[:end])

    def flush(self) -> bytes:
        """Return the redacted unfinished line."""
        held, self._held = self._held, b""
        return self._redact(held)

    def _redact(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        if self._is_in_key:
            _, end, text = text.partition(_KEY_END)
            self._is_in_key, text = not end, end + text
        begin = text.rfind(_KEY_BEGIN)
        if begin >= 0 and "PRIVATE KEY" in text[begin:] and _KEY_END not in text[begin:]:
            self._is_in_key = True
        return redact_text(text).encode("utf-8", "surrogateescape")


_KEY_BEGIN, _KEY_END = "-----BEGIN", "-----END"
# A longer line is redacted in parts.
_MAX_HELD_BYTES = 1 << 16
