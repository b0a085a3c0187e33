"""Removes passwords, tokens and keys from texts and from objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from rollout_api.redis_client.address import without_password

HIDDEN = "***"
"""The text that replaces a secret."""

_MIN_KNOWN_LENGTH = 4
"""Minimum length of a known secret that is removed wherever it occurs; shorter ones occur in ordinary words."""
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://(?:[^\s\"`@/]{1,256}@)?[^\s\"'<>`]+")
_SECRET_SHAPES = re.compile(
    r"""
      (?P<scheme>\b[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}
    | (?P<directive>(?:^|["'>]|\bSET\b|\bsentinel\b)[ \t]*(?:requirepass|masterauth|auth-pass[ \t]+\S+)[ \t]+)
      (?:"[^"\n]*"|[^\s:='"]+)                                # Redis and its Sentinels
    | \bhf_[A-Za-z0-9]{16,}                                   # Hugging Face
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}     # GitHub
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}                       # OpenAI and others
    | \bglpat-[\w-]{16,} | \bxox[abprs]-[\w-]{12,}           # GitLab, Slack
    | \bA[KS]IA[0-9A-Z]{16}\b                                 # AWS
    | (?<![\w-])eyJ[\w-]{8,8192}\.[\w-]{8,}\.[\w-]*          # JSON web tokens, as of ServiceAccounts
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_PASSWORD_RULE = re.compile(
    r"""(?P<rules>\b(?:user|SETUSER)[ \t]+\S{1,256}[ \t]+(?:on|off|reset)[ \t][^\n>]{0,256}(?<![^\s"']))>[^\s"']+"""
)
"""A user of Redis with the rules of its ACL up to the first password."""
_NAME = re.compile(
    r"""
    (?<![\w.-]) (?P<option>--)? (?P<name>[A-Za-z_][\w.-]*)
    (?: (?:\\*["'])? \s* [:=] \s* (?:[Bb](?:asic|earer)\s+)? | (?(option)\s+|(?!)) )
    """,
    re.VERBOSE,
)
"""The name of a field, of a variable or of an option, and what separates it from its value."""
_VALUE = re.compile(
    r"""\\+["'][^"'\\]*\\+["'] | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s,;&"'}\])]+""",
    re.VERBOSE,
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[-+]?\d[\d.,_]*(?:[eE][-+]?\d+)?%?")
_SECRET_PARTS = (
    *("password", "passwd", "passphrase", "secret", "credential", "apikey", "authorization"),
    *("requirepass", "masterauth", "signature"),
)
"""Parts of names whose values are secret whatever they look like."""
_SECRET_ENDINGS = frozenset({"auth", "pass", "pwd", "sig"})
"""Last words of names whose values are secret."""
_ENVIRONMENT_PARTS = ("TOKEN", "KEY")
"""Further parts of the names of environment variables with secrets."""
_KINDS_OF_KEYS = frozenset({"access", "account", "admin", "api", "auth", "encryption", "master", "private", "signing"})
"""Words before "key" that tell a secret key from that of a mapping."""
_HARMLESS_ENDINGS = frozenset(
    {"count", "dir", "error", "file", "id", "ids", "kind", "length", "name", "names", "path", "prefix", "ref", "type"}
)
"""Last words of names whose values tell where a secret is, or something about it, but not the secret."""
_NO_VALUES = frozenset({"true", "false", "none", "null"})
_DESCRIBED_REFERENCE = "<set"
"""First word of what ``kubectl describe`` shows in place of a value from a Secret."""


def is_secret_name(name: str, *, in_object: bool = False) -> bool:
    """Return whether the value of a field, an option or an environment variable is probably secret.

    Args:
        name: the name, in any spelling.
        in_object: whether the name is that of a field. In texts, ``key`` and ``token`` also occur as ordinary words, so
            that fewer names count there.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _HARMLESS_ENDINGS:
        return False
    squashed = "".join(words)
    if words[-1] in _SECRET_ENDINGS or any(part in squashed for part in _SECRET_PARTS):
        return True
    if name.isupper() and any(part in name.replace("TOKENIZER", "") for part in _ENVIRONMENT_PARTS):
        return True
    if words[-1] == "key":
        return in_object or bool(_KINDS_OF_KEYS & set(words))
    return words[-1] == "token" or (in_object and words[-1] in ("tokens", "keys"))


class Redactor:
    """Removes secrets: those that are known, those with a known shape, and the values of fields with such names."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """Create a redactor.

        Args:
            known: secrets that are removed wherever they occur, percent-encoded or not.
        """
        forms = {form for secret in known for form in (secret, quote(secret, safe=""), unquote(secret))}
        ordered = sorted((form for form in forms if len(form) >= _MIN_KNOWN_LENGTH), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """Return *text*, for example a log, without secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _URL.sub(lambda url: without_password(url[0]), text)
        text = _SECRET_SHAPES.sub(lambda found: (found["scheme"] or found["directive"] or "") + HIDDEN, text)
        text = _PASSWORD_RULE.sub(lambda found: f"{found['rules']}>{HIDDEN}", text)
        return _without_values(text)

    def value(self, value: Any) -> Any:
        """Return *value*, which consists of mappings, lists and scalars as a JSON document does, without secrets.

        The values of an environment are recognized in the form of Kubernetes, too: ``{name: HF_TOKEN, value: …}``.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, Sequence):
            return self._arguments(value)
        return value

    def _mapping(self, fields: Mapping[Any, Any]) -> dict[Any, Any]:
        variable = fields.get("name")
        is_reference = isinstance(variable, str) and isinstance(fields.get("key"), str) and "value" not in fields
        redacted = {}
        for name, value in fields.items():
            field = str(name)
            if is_reference and field == "key":
                redacted[name] = value
            elif field == "value" and isinstance(variable, str) and is_secret_name(variable, in_object=True):
                redacted[name] = _hide(variable, value)
            elif is_secret_name(field, in_object=True):
                redacted[name] = _hide(field, self.value(value))
            else:
                redacted[name] = self.value(value)
        return redacted

    def _arguments(self, values: Sequence[Any]) -> list[Any]:
        """Redact a list, which may be a command line: the value of an option follows its name."""
        redacted = []
        option = ""
        for value in values:
            redacted.append(HIDDEN if option and isinstance(value, str) else self.value(value))
            is_option = isinstance(value, str) and value.startswith("--") and "=" not in value
            option = value if is_option and is_secret_name(value) else ""
        return redacted


def _hide(name: str, value: Any) -> Any:
    """Return what stands in place of the value of a field with a secret name."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list):
        return [_hide(name, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and not _is_always_secret(name):
        return value  # such as a number of tokens
    return HIDDEN if value != "" else value


def _is_always_secret(name: str) -> bool:
    squashed = "".join(_WORD.findall(name)).lower()
    return any(part in squashed for part in _SECRET_PARTS)


def _without_values(text: str) -> str:
    """Replace the values that are assigned to secret names."""
    parts = []
    position = end = 0
    while (found := _NAME.search(text, position)) is not None:
        position = found.end()
        value = _VALUE.match(text, position) if is_secret_name(found["name"]) else None
        if value is not None and is_secret_value(found["name"], value[0]):
            parts += [text[end:position], HIDDEN]
            position = end = value.end()
    return "".join([*parts, text[end:]])


def is_secret_value(name: str, value: str) -> bool:
    """Return whether the value of something with a secret name is secret, and no number of tokens, for example."""
    if value in (HIDDEN, _DESCRIBED_REFERENCE) or value.lower() in _NO_VALUES:
        return False
    return _is_always_secret(name) or _NUMBER.fullmatch(value) is None
