"""Read YAML of others: plain values without tags, and without aliases, which can make a short text huge."""

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it has an alias; write the value again")
        return super().compose_node(parent, index)


def load_plain_yaml(data: bytes) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: it is not YAML, or has a tag or an alias.
    """
    try:
        return yaml.load(data, _PlainLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())[:300] or type(error).__name__) from error
