"""
`ImageClassifier`: backbone, linear classifier and method head as one `PreTrainedModel`.

It is saved as `config.json` and `model.safetensors`, batch-normalisation statistics included, and registered with
transformers: after `import dappr_llm.vision.model`, `AutoModelForImageClassification.from_pretrained` loads it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..core.errors import UserError
from ..core.schemas.synonyms import dtype_name
from ..methods import HeadInfo, get_method
from .backbones import add_lora, build_backbone, feature_dim, normalise_spectrum
from .option_checks import check_shape

_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")


class ImageClassifierConfig(PretrainedConfig):
    """
    Configuration of an [`ImageClassifier`].

    Args:
        backbone (`str`, *optional*, defaults to `"resnet18"`):
            `"convnet"` or a timm model name.
        num_classes (`int`, *optional*, defaults to 10):
            Number of classes K.
        class_names (`Sequence[str]`, *optional*):
            Names of the classes; saved as `id2label`.
        channels, image_size (`int`, *optional*, default to 3 and 32):
            Shape of the input images.
        transform (`Mapping`, *optional*):
            Fields of the [`ImageTransform`] for evaluation, also used for OOD datasets.
        task (`str`, *optional*):
            Name of the training task. Labels of other tasks are ignored if class names are mere numbers.
        stem (`str`, *optional*, defaults to `"default"`):
            `"small"` for images of 32 or 64 pixels; see [`build_backbone`].
        hidden (`Sequence[int]`, *optional*):
            Widths of linear layers (each with ReLU) between backbone and classifier.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout before the classifier and between the hidden layers; MC dropout samples it.
        frozen (`bool`, *optional*, defaults to `False`):
            Freeze the backbone and train only the layers after it.
        backbone_options (`Mapping`, *optional*):
            Further arguments of `timm.create_model`.
        lora (`Mapping`, *optional*):
            Fields of `peft.LoraConfig`: train LoRA layers in the frozen backbone.
        method (`Mapping`, *optional*):
            `name` and `options` of the method, which determines the number of logits, the head and spectral
            normalisation. Without one: K logits.
        class_counts (`Sequence[int]`, *optional*):
            Training images per class, for methods whose head needs them (PostNet, DAEDL).
        spectral_factor (`float`, *optional*, defaults to 1.0):
            Largest singular value of each layer, for methods with spectral normalisation.
    """

    model_type = "dappr_image_classifier"

    def __init__(
        self,
        backbone: str = "resnet18",
        num_classes: int = 10,
        class_names: Sequence[str] | None = None,
        channels: int = 3,
        image_size: int = 32,
        transform: Mapping[str, Any] | None = None,
        task: str | None = None,
        stem: str = "default",
        hidden: Sequence[int] | None = None,
        dropout: float = 0.0,
        frozen: bool = False,
        backbone_options: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        method: Mapping[str, Any] | None = None,
        class_counts: Sequence[int] | None = None,
        spectral_factor: float = 1.0,
        **kwargs: Any,
    ):
        self.backbone = backbone
        self.channels = channels
        self.image_size = image_size
        self.transform = dict(transform) if transform is not None else None
        self.task = task
        self.stem = stem
        self.hidden = list(hidden or [])
        self.dropout = dropout
        self.frozen = frozen
        self.backbone_options = dict(backbone_options or {})
        self.lora = dict(lora) if lora is not None else None
        self.method = {"name": method["name"], "options": dict(method.get("options", {}))} if method else None
        self.class_counts = [int(count) for count in class_counts] if class_counts is not None else None
        self.spectral_factor = spectral_factor
        self.num_classes = num_classes
        if kwargs.get("id2label") is None:
            names = list(class_names or map(str, range(num_classes)))
            if len(names) != num_classes:
                raise UserError(f"{num_classes} classes, but {len(names)} class names")
            kwargs["id2label"] = dict(enumerate(names))
            kwargs["label2id"] = {name: i for i, name in enumerate(names)}
        super().__init__(**kwargs)

    @property
    def class_names(self) -> list[str]:
        """Class names in the order of the labels."""
        return [self.id2label[i] for i in range(self.num_classes)]


@dataclass
class ImageClassifierOutput(ModelOutput):
    """
    Output of a forward pass, in float32.

    Args:
        logits (`Tensor`, *optional*):
            `[B, C]`; `None` for methods that use only their head.
        features (`Tensor`):
            `[B, D]`, the input of classifier and head.
        head (`dict[str, Tensor]`, *optional*):
            Outputs of the method's head by name.
    """

    logits: Tensor | None = None
    features: Tensor | None = None
    head: dict[str, Tensor] | None = None


class ImageClassifier(PreTrainedModel):
    """
    An image classifier with a method's head.

    Args:
        config (`ImageClassifierConfig`):
            Its configuration.
        pretrained (`bool`, *optional*, defaults to `False`):
            Initialise the backbone with timm's pretrained weights. Not needed for our checkpoints, which are complete.

    Example:

    ```python
    >>> config = ImageClassifierConfig("resnet18", num_classes=10, stem="small", method={"name": "dappr"})
    >>> ImageClassifier(config)(torch.rand(8, 3, 32, 32)).logits.shape
    torch.Size([8, 10])
    ```
    """

    config_class = ImageClassifierConfig
    base_model_prefix = "backbone"
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False

    def __init__(self, config: ImageClassifierConfig, pretrained: bool = False):
        super().__init__(config)
        check_shape(config)
        self.backbone = build_backbone(
            config.backbone, config.channels, config.image_size, config.stem, pretrained, config.backbone_options
        )
        pooled = feature_dim(self.backbone, config.channels, config.image_size)
        if config.frozen:
            self.backbone.requires_grad_(False)
        if config.lora is not None:
            add_lora(self.backbone, config.lora)
        widths = [pooled, *config.hidden]
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Dropout(config.dropout)] if layers and config.dropout else []
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.hidden = nn.Sequential(*layers)
        self.dropout = nn.Dropout(config.dropout)
        method = get_method(config.method["name"], **config.method["options"]) if config.method else None
        outputs = method.num_outputs(config.num_classes) if method else config.num_classes
        self.classifier = nn.Linear(widths[-1], outputs) if outputs else None
        if method and "spectral_norm" in method.needs:
            normalise_spectrum(self, config.spectral_factor)
        counts = tuple(config.class_counts) if config.class_counts is not None else None
        info = HeadInfo(config.num_classes, widths[-1], counts)
        self.method_head = method.build_head(info) if method else None
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        name: str | Path,
        *args: Any,
        config: ImageClassifierConfig | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> ImageClassifier:
        """
        Load a saved classifier, in evaluation mode.

        Overrides transformers' loading on the meta device, which would lose the non-persistent buffers that timm
        computes at construction (such as Swin's relative positions).

        Args:
            name (`str` or `Path`):
                Folder or Hub id.
            config (`ImageClassifierConfig`, *optional*):
                Configuration to use instead of the saved one.
            dtype (`torch.dtype` or `str`, *optional*):
                Dtype of the weights; by default float32.
            kwargs:
                `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`, `force_download`.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        from transformers.utils import cached_file

        where = {key: value for key, value in kwargs.items() if key in _HUB and value is not None}
        path = cached_file(str(name), "model.safetensors", **where)
        try:
            model = cls(config or cls.config_class.from_pretrained(name, **where))
        except UserError as error:
            raise UserError(f"{name}, config.json: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{name}, config.json is damaged ({reason}); fetch or train the classifier again"
            ) from None
        try:
            weights = load_file(str(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); fetch or train the classifier again") from None
        model.load_weights(weights, str(path))
        if dtype is not None and dtype != "auto":
            model = model.to(getattr(torch, dtype_name(dtype)) if isinstance(dtype, str) else dtype)
        return model.eval()

    def load_weights(self, weights: Mapping[str, Tensor], where: str, head: bool = True) -> None:
        """
        Load a state dictionary; a `UserError` if keys or shapes do not match.

        Args:
            weights (`Mapping[str, Tensor]`):
                The state dictionary.
            where (`str`):
                Its file, for error messages.
            head (`bool`, *optional*, defaults to `True`):
                Load the method's head. `False` for weights of another method: the head keeps its initial weights, and
                so does the linear classifier if only one of the two methods has one.
        """
        own = () if head else ("method_head.",)
        if not head and (self.classifier is None) == any(key.startswith("classifier.") for key in weights):
            own = (*own, "classifier.")
        kept = {key: value for key, value in weights.items() if not key.startswith(own)}
        for key, value in self.state_dict().items():
            if key in kept and kept[key].is_floating_point() != value.is_floating_point():
                raise UserError(f"{where}: {key} holds numbers of type {kept[key].dtype}, not {value.dtype}")
        try:
            missing, unexpected = self.load_state_dict(kept, strict=False)
        except RuntimeError as error:
            raise UserError(f"{where} does not fit this model: {str(error).splitlines()[-1].strip()}") from None
        missing = [key for key in missing if not key.startswith(own)]
        if missing or unexpected:
            problem = f"lacks {missing[0]}" if missing else f"also holds {unexpected[0]}"
            raise UserError(f"{where} does not fit this model: it {problem}")

    def _init_weights(self, module: nn.Module) -> None:
        """No-op: timm, torch and the heads initialise their own weights."""

    @property
    def feature_dim(self) -> int:
        """Width D of the features that classifier and head receive."""
        return self.hidden[-2].out_features if len(self.hidden) else self._pooled()

    def _pooled(self) -> int:
        if self.classifier is not None:
            return self.classifier.in_features
        return feature_dim(self.backbone, self.config.channels, self.config.image_size)

    def train(self, mode: bool = True) -> ImageClassifier:
        """Set training mode; a frozen backbone stays in evaluation mode, which fixes its batch-norm statistics."""
        super().train(mode)
        if self.config.frozen and self.config.lora is None:
            self.backbone.eval()
        return self

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> ImageClassifierOutput:
        """
        One forward pass.

        Args:
            pixel_values (`Tensor`):
                Normalised images `[B, C, H, W]`.
        """
        frozen = self.config.frozen and self.config.lora is None and not pixel_values.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            pooled = self.backbone(pixel_values)
        features = self.hidden(pooled).float()
        # The last layer and the head run in float32: half precision is too coarse for evidence.
        with torch.autocast(device_type=pixel_values.device.type, enabled=False):
            logits = None
            if self.classifier is not None:
                logits = self.classifier(self.dropout(features).to(self.classifier.weight.dtype)).float()
            head = None if self.method_head is None else self.method_head(features=features, logits=logits)
        return ImageClassifierOutput(logits=logits, features=features, head=head)


AutoConfig.register(ImageClassifierConfig.model_type, ImageClassifierConfig, exist_ok=True)
AutoModel.register(ImageClassifierConfig, ImageClassifier, exist_ok=True)
AutoModelForImageClassification.register(ImageClassifierConfig, ImageClassifier, exist_ok=True)
