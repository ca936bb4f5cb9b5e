"""Keys and values that belong to later versions: refused by this one, so that none of them is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Keys that have no meaning yet, with what they will be for.
LATER_KEYS: Mapping[str, str] = {
    "model.kv_heads": 'grouped key and value heads, of the family "llama"',
    "model.rope_theta": 'rotary positions, of the family "llama"',
    "model.init_from": "weights from a Hugging Face folder or a checkpoint",
    "batch.ramp": "a batch that grows during the run",
    "pipeline.placement": "a placement of stages on ranks other than the schedule's own",
}

# Values that are known words, of keys whose other values work.
LATER_VALUES: Mapping[str, tuple[object, ...]] = {
    "model.family": ("llama",),
    "data.format": ("npy", "bin-u16", "bin-u32", "megatron"),
    "pipeline.recompute": ("block",),
    "precision.compute": ("bfloat16", "float16"),
    "precision.gradients": ("bfloat16", "float16"),
    "checkpoint.on_disk_trouble": ("retry",),
}

# The only value that works today, for keys whose type allows more.
ONLY_NOW: Mapping[str, object] = {
    "pipeline.replicas": 1,
    "optimizer.shard": False,
    "checkpoint.background": False,
    "log.tensorboard": False,
}


def refused(values: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, object, str]]:
    """``(key, value, only value allowed)`` of each key in ONLY_NOW with another; ``values``: section, key, value."""
    for key, only in ONLY_NOW.items():
        section, name = key.split(".")
        value = values[section][name]
        if value != only:
            yield key, value, str(only).lower() if isinstance(only, bool) else f"{only:g}"
