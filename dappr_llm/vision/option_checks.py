"""
What a recipe or a checkpoint's `config.json` may ask of a backbone.

Options go to `timm.create_model`, which loads files (`checkpoint_path`, `pretrained_cfg`) and other repositories'
settings and weights (`hf-hub:`, `local-dir:`). So names and options are listed here, and values are plain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..core.errors import UserError, nearest

OLDEST_TIMM = (1, 0, 26)  # older versions load pickles with code in them
# A model of timm's registry, and the tag of its pretrained weights.
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100})?")
_TEXT = re.compile(r"[A-Za-z0-9_.-]{0,40}")
_MOST, _MOST_ENTRIES = 16_384, 64
CONVNET_OPTIONS = frozenset({"width"})
TIMM_OPTIONS = frozenset(
    (
        # sizes of the input
        *("img_size", "patch_size", "window_size", "window_ratio", "dynamic_img_size", "dynamic_img_pad"),
        *("strict_img_size", "always_partition", "output_stride"),
        # dropout
        *("drop_rate", "drop_path_rate", "drop_block_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate"),
        *("patch_drop_rate",),
        # depth and width
        *("depth", "depths", "layers", "channels", "embed_dim", "embed_dims", "dim", "dims", "width", "widths"),
        *("num_heads", "head_dim", "mlp_ratio", "mlp_ratios", "cardinality", "base_width", "kernel_size"),
        *("kernel_sizes", "expand_ratio", "sr_ratios"),
        # pooling, tokens, normalisation
        *("global_pool", "class_token", "reg_tokens", "no_embed_class", "pos_embed", "use_abs_pos_emb"),
        *("qkv_bias", "qk_norm", "pre_norm", "fc_norm", "final_norm", "use_post_norm", "norm_eps"),
        *("init_values", "ls_init_value", "layer_scale_init_value", "head_init_scale", "zero_init_last"),
        *("weight_init", "norm_layer", "act_layer", "conv_bias"),
        # stems
        *("stem_type", "stem_width", "stem_size", "stem_chs", "avg_down", "replace_stem_pool"),
    )
)


def check_timm(version: str) -> None:
    """Raise a `UserError` for a version of timm that is too old."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if found < OLDEST_TIMM:
        wanted = ".".join(map(str, OLDEST_TIMM))
        raise UserError(f"timm {version} is too old, {wanted} is needed: pip install --upgrade 'timm>={wanted}'")


def check_backbone(name: Any, options: Any) -> None:
    """
    Raise a `UserError` unless a backbone is a plain name and its options are known and plain.

    Args:
        name (`str`):
            `"convnet"`, or a name of timm's registry.
        options (`Mapping`):
            Further arguments of `timm.create_model`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"model.backbone: {str(name)[:80]!r} is not a name of a timm model; names that load files or repositories "
            "(hf-hub:, local-dir:) are not supported"
        )
    if not isinstance(options, Mapping):
        raise UserError(f"model.backbone_options is {str(options)[:80]!r}; it is a mapping of options to values")
    valid = CONVNET_OPTIONS if name == "convnet" else TIMM_OPTIONS
    for key, value in options.items():
        if key not in valid:
            raise UserError(f"model.backbone_options: {str(key)[:80]!r} is not supported; {nearest(key, valid)}")
        _check_value(value, f"model.backbone_options.{key}")


def _check_value(value: Any, key: str, nested: int = 0) -> None:
    if isinstance(value, list | tuple) and nested < 2 and len(value) <= _MOST_ENTRIES:
        for entry in value:
            _check_value(entry, key, nested + 1)
        return
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _MOST
    if value is None or is_number or (isinstance(value, str) and _TEXT.fullmatch(value)):
        return
    raise UserError(
        f"{key} is {str(value)[:80]!r}; it is a number up to {_MOST}, true or false, a short word, or a list of them"
    )


def check_shape(config: Any) -> None:
    """Raise a `UserError` for sizes in an image classifier's config that no classifier has."""
    limits = {"num_classes": (1, 10**6), "channels": (1, 64), "image_size": (1, _MOST)}
    for key, (least, most) in limits.items():
        _check_range(getattr(config, key), key, least, most, whole=True)
    _check_range(config.dropout, "dropout", 0, 1)
    _check_range(config.spectral_factor, "spectral_factor", 0, _MOST)
    if len(config.hidden) > _MOST_ENTRIES:
        raise UserError(f"model.hidden has {len(config.hidden)} layers; at most {_MOST_ENTRIES}")
    for width in config.hidden:
        _check_range(width, "hidden", 1, _MOST, whole=True)
    if not isinstance(config.frozen, bool):
        raise UserError(f"model.frozen is {config.frozen!r}; it is true or false")


def _check_range(value: Any, key: str, least: float, most: float, whole: bool = False) -> None:
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        sort = "a whole number" if whole else "a number"
        raise UserError(f"model.{key} is {str(value)[:80]!r}; it is {sort} from {least} to {most}")
