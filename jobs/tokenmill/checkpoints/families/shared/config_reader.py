"""Values of a config.json or their defaults, with errors that name the key; each family reads its config with it."""

from typing import Any

from tokenmill.errors import RequestError

Config = dict[str, Any]
"""Keys of a config.json with their values; the file is of an unknown origin."""

Fields = dict[str, Any]
"""Fields of a `Model`, with their names in a file of values (camelCase), before they are checked."""

MAX_SHOWN_CHARACTERS = 200
"""Maximum characters of a value in a message."""


class ConfigReader:
    """The content of a config.json; `source` names the file in messages, `defaults` are those of the model type."""

    def __init__(self, config: Config, source: str, defaults: Config) -> None:
        self.config, self.source, self.defaults = config, source, defaults

    def value(self, key: str, kind: type) -> Any:
        """Return a value of one type; None only where that is the default."""
        default = self.defaults.get(key)
        value = self.config.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind and not (value is None and key in self.defaults and default is None):
            raise RequestError(
                f"{self.source}: {key} is {self.show(value)}, but must be of type {kind.__name__}; correct the file"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; null counts as false."""
        return self.config.get(key, ...) is not None and bool(self.value(key, bool))

    def count(self, key: str, if_null: int | None = None) -> int:
        """Return a number above 0; `if_null` is the meaning of null."""
        value = self.value(key, int) if self.config.get(key, self.defaults[key]) is not None else if_null
        if value is None or value < 1:
            raise RequestError(f"{self.source}: {key} is {self.show(value)}, but must be above 0; correct the file")
        return value

    def share(self, key: str) -> float:
        """Return a number from 0 to below 1."""
        value: float = self.value(key, float)
        if not 0 <= value < 1:
            raise RequestError(f"{self.source}: {key} is {value}, but must be from 0 to below 1; correct the file")
        return value

    def show(self, value: object) -> str:
        """Return a value for a message."""
        text = repr(value)
        return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."

    def refuse(self, key: str, feature: str, remedy: str = "use another model") -> RequestError:
        """Return the error for a feature that Megatron-LM would compute in another way, or not at all."""
        return RequestError(
            f"{self.source}: {key}: Megatron-LM, as tokenmill runs it, does not support {feature}; {remedy}"
        )
