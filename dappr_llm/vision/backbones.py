"""
Backbones (any timm model, or the ConvNet of the MNIST experiments), small stems, LoRA and spectral normalisation.

A backbone is a module that maps images `[B, C, H, W]` to pooled features `[B, D]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import UserError, nearest
from ..core.lora_options import check_lora_options
from .option_checks import check_backbone, check_timm

STEMS = ("default", "small")
# Default LoRA options: the attention layers of timm's ViTs.
_LORA = {"r": 8, "lora_alpha": 16, "target_modules": r".*attn\.(qkv|proj)"}


class ConvNet(nn.Module):
    """
    Three blocks of 5x5 convolution, 2x2 max-pooling and ReLU, then two linear layers with ReLU; all 64 wide.

    Args:
        channels (`int`, *optional*, defaults to 1):
            Channels of the image.
        image_size (`int`, *optional*, defaults to 28):
            Height and width; at least 8, since it is halved three times.
        width (`int`, *optional*, defaults to 64):
            Channels of the convolutions and width of the linear layers.
    """

    def __init__(self, channels: int = 1, image_size: int = 28, width: int = 64):
        super().__init__()
        sizes = (channels, width, width, width)
        blocks = [
            # ReLU and max-pooling commute; pooling first leaves a quarter of the activations to the ReLU.
            nn.Sequential(nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
            for before, after in zip(sizes, sizes[1:], strict=False)
        ]
        self.convolutions = nn.Sequential(*blocks)
        flat = width * (image_size // 8) ** 2
        self.dense = nn.Sequential(nn.Linear(flat, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.dense(self.convolutions(images).flatten(1))  # [B, width]


def build_backbone(
    name: str,
    channels: int,
    image_size: int,
    stem: str = "default",
    pretrained: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """
    Build a backbone without its classifier.

    Args:
        name (`str`):
            `"convnet"` or a timm model name, with the tag of its pretrained weights (`vit_base_patch16_224.mae`).
        channels (`int`):
            Input channels.
        image_size (`int`):
            Height and width of the input.
        stem (`str`, *optional*, defaults to `"default"`):
            `"small"` for images of 32 or 64 pixels: in ResNets the first convolution becomes 3x3 with stride 1 and the
            first max-pooling is removed; in VGGs the linear layers for 7x7 maps are removed, leaving 512 pooled
            channels.
        pretrained (`bool`, *optional*, defaults to `False`):
            Load timm's pretrained weights from its cache or the Hub.
        options (`Mapping`, *optional*):
            Further arguments of `timm.create_model` (`img_size`, `patch_size`, `global_pool`, `drop_path_rate`, ...):
            those in `option_checks.TIMM_OPTIONS`.
    """
    check_backbone(name, options or {})
    if stem not in STEMS:
        raise UserError(f"model.stem: {stem!r} is unknown; {nearest(stem, STEMS)}")
    if name == "convnet":
        if pretrained or stem != "default":
            raise UserError("model.backbone: convnet has neither pretrained weights nor another stem")
        if image_size < 8:
            raise UserError(f"model.backbone: convnet halves an image three times; {image_size} pixels are too few")
        width = (options or {}).get("width", 64)
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise UserError(f"model.backbone_options.width is {width!r}; it is a whole number from 1 on")
        return ConvNet(channels, image_size, width)
    backbone = _timm_model(name, channels, pretrained, dict(options or {}))
    if stem == "small":
        _small_stem(name, backbone)
    return backbone


def _timm_model(name: str, channels: int, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise UserError("Image models need timm: pip install 'dappr-llm[vision]'") from None
    check_timm(timm.__version__)
    base = name.partition(".")[0]
    if not timm.is_model(base):
        raise UserError(f"model.backbone: timm knows no {base!r}; {nearest(base, ['convnet', *timm.list_models()])}")
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=channels, **options)
    except TypeError as error:
        raise UserError(f"model.backbone_options: {name} does not take them ({error})") from None
    except Exception as error:  # values that do not fit each other raise anything: KeyError, AssertionError, …
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not pretrained or isinstance(error, RuntimeError):
            raise UserError(f"model.backbone: {name} cannot be built ({reason})") from None
        raise UserError(
            f"model.pretrained: the weights of {name} could not be loaded ({reason}); download them once with a "
            "network connection, or set model.pretrained: false"
        ) from None


def _small_stem(name: str, backbone: Any) -> None:
    """Adapt a ResNet or VGG to small images, in place; recognised by their attributes."""
    first = getattr(backbone, "conv1", None)
    if isinstance(first, nn.Conv2d) and hasattr(backbone, "maxpool"):
        backbone.conv1 = nn.Conv2d(
            first.in_channels, first.out_channels, 3, stride=1, padding=1, bias=first.bias is not None
        )
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.maxpool = nn.Identity()
    elif hasattr(backbone, "pre_logits") and hasattr(backbone, "features"):
        backbone.pre_logits = nn.Identity()
    else:
        raise UserError(
            f"model.stem: small is for ResNets and VGGs, not for {name}; give a ViT its sizes in "
            "model.backbone_options (img_size, patch_size)"
        )


@torch.no_grad()
def feature_dim(backbone: nn.Module, channels: int, image_size: int) -> int:
    """Width D of a backbone's features, found by a forward pass; after edits timm's `num_features` may be wrong."""
    parameter = next(backbone.parameters())
    training = backbone.training
    backbone.eval()
    images = torch.zeros(1, channels, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
    try:
        features: Tensor = backbone(images)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"model.backbone does not take images of {image_size} pixels and {channels} channels "
            f"({str(error).splitlines()[0]}); set model.image_size, or model.backbone_options (img_size, patch_size)"
        ) from None
    finally:
        backbone.train(training)
    if features.dim() != 2:
        raise UserError(f"model.backbone gives features of shape {tuple(features.shape)} instead of one row per image")
    return features.shape[1]


def add_lora(backbone: nn.Module, options: Mapping[str, Any]) -> None:
    """Inject LoRA layers into a backbone, in place; all its other parameters are frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    check_lora_options(options, "model", "lora.")
    try:
        inject_adapter_in_model(LoraConfig(**{**_LORA, **options}), backbone)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"lora: {str(error).splitlines()[0]}") from None


class _Scale(nn.Module):
    """Parametrisation applied after spectral normalisation: scales the largest singular value to `factor`."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight


def normalise_spectrum(module: nn.Module, factor: float = 1.0) -> None:
    """Add spectral normalisation to all trainable `Conv2d` and `Linear` layers; `factor`: largest singular value."""
    from torch.nn.utils import parametrizations, parametrize

    for layer in [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]:
        if layer.weight.requires_grad and not parametrize.is_parametrized(layer, "weight"):
            parametrizations.spectral_norm(layer)
            if factor != 1.0:
                parametrize.register_parametrization(layer, "weight", _Scale(factor))
