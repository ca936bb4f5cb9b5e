"""The known keys of a run file, what each one takes, and the nearest known key of a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# What other programs call a key of ours.
FOREIGN_NAMES: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "grad_clip": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "max_steps": "run.steps",
    "train_steps": "run.steps",
    "output_dir": "run.dir",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "hidden_size": "model.hidden",
    "d_model": "model.hidden",
    "n_embd": "model.hidden",
    "num_heads": "model.heads",
    "n_head": "model.heads",
    "vocab_size": "model.vocab",
    "seq_len": "model.sequence",
    "sequence_length": "model.sequence",
    "context_length": "model.sequence",
    "batch_size": "batch.sequences",
    "global_batch_size": "batch.sequences",
    "micro_batch_size": "batch.microbatch",
    "num_stages": "pipeline.ranks",
    "num_ranks": "pipeline.ranks",
    "virtual_stages": "pipeline.chunks",
}


def section_fields(root: type[BaseModel]) -> dict[str, dict[str, FieldInfo]]:
    """Fields of every section, by section name and key, in the order of the file."""
    sections = {}
    for name, field in root.model_fields.items():
        section, _ = _plain_type(field)  # [model] may be left out
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        sections[name] = dict(section.model_fields)
    return sections


def options(field: FieldInfo) -> tuple[str, ...]:
    """The words that a field of named options takes, or nothing for other fields."""
    if get_origin(field.annotation) is Literal:
        return tuple(str(word) for word in get_args(field.annotation))
    return ()


def _plain_type(field: FieldInfo) -> tuple[object, list[object]]:
    """The field's type without None, and its constraints, be they written on the field or inside the union."""
    annotation: object = field.annotation
    constraints: list[object] = list(field.metadata)
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
        if hasattr(annotation, "__metadata__"):
            for extra in annotation.__metadata__:
                constraints.extend(getattr(extra, "metadata", ()))
            annotation = get_args(annotation)[0]
    return annotation, constraints


def expected(field: FieldInfo) -> str:
    """What a field takes, in words: ``a whole number, at least 1``."""
    words = options(field)
    if words:
        return ", ".join(f'"{word}"' for word in words)
    annotation, constraints = _plain_type(field)
    if annotation is bool:
        return "true or false"
    if annotation is not int and annotation is not float:
        return "text in quotes"
    parts = ["a whole number" if annotation is int else "a number"]
    for attribute, words_before in (("ge", "at least"), ("gt", "above"), ("lt", "below"), ("le", "at most")):
        for constraint in constraints:
            limit = getattr(constraint, attribute, None)
            if limit is not None and not (attribute == "le" and limit >= 2**31 - 1):
                parts.append(f"{words_before} {limit:g}")
    return parts[0] + (", " + " and ".join(parts[1:]) if len(parts) > 1 else "")


def close(word: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most like ``word``, or None."""
    found = difflib.get_close_matches(word[:80], known, n=1, cutoff=cutoff)
    return found[0] if found else None


def nearest_section(name: str, sections: Collection[str]) -> str | None:
    """The known section whose name is most like ``name``, or None."""
    return close(name.lower(), sections)


def nearest_key(
    section: str, name: str, fields: dict[str, dict[str, FieldInfo]], present: Collection[str] = ()
) -> str | None:
    """The known key, as ``section.key``, that ``section.name`` was meant to be, or None.

    In this order: what other programs call by that name; a similar key of this section that the file does not give yet
    (``present``: the dotted keys that it gives); the key of that very name in another section; a similar one anywhere.
    """
    name = name.lower()
    foreign = close(name, tuple(FOREIGN_NAMES), cutoff=0.8)
    if foreign and name not in fields.get(section, ()):
        return FOREIGN_NAMES[foreign]
    own = close(name, tuple(fields.get(section, ())))
    if own and f"{section}.{own}" not in present:
        return f"{section}.{own}"
    elsewhere = {key: other for other, keys in reversed(fields.items()) for key in keys if other != section}
    if name in elsewhere:
        return f"{elsewhere[name]}.{name}"
    if own:
        return f"{section}.{own}"
    far = close(name, tuple(elsewhere))
    return f"{elsewhere[far]}.{far}" if far else None
