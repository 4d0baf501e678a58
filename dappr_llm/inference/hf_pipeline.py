"""The task `multiple-choice-uncertainty` of `transformers.pipeline`, a thin wrapper of `UncertaintyPipeline`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import Pipeline, PretrainedConfig

TASK = "multiple-choice-uncertainty"


class _Checkpoint:
    """Takes the place of a model class in the registry of transformers: loads a checkpoint with its decision rule."""

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        revision: str | None = None,
        dtype: str = "auto",
        config: PretrainedConfig | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        from .pipeline import UncertaintyPipeline

        # transformers has already resolved the config of the base model, which names its location.
        base = getattr(config, "_name_or_path", None) or None
        pipe = UncertaintyPipeline.from_pretrained(name, base, revision, dtype=dtype, device=kwargs.get("device"))
        pipe.run.model.uncertainty_pipeline = pipe  # type: ignore[assignment] # found again in `__call__`
        return pipe.run.model


def _pipeline_class() -> type[Pipeline]:
    import transformers

    class MultipleChoiceUncertaintyPipeline(transformers.Pipeline):
        """Returns answers as dictionaries, as other `transformers` pipelines do."""

        _load_tokenizer = False
        _load_processor = False
        _load_image_processor = False
        _load_feature_extractor = False
        _load_video_processor = False

        def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
            return {}, {}, {}

        # `__call__` answers by itself; the three steps of a transformers pipeline only have to exist.
        def preprocess(self, inputs: Any, **kwargs: Any) -> Any:
            return inputs

        def _forward(self, inputs: Any, **kwargs: Any) -> Any:
            return self.model.uncertainty_pipeline(**inputs)

        def postprocess(self, outputs: Any, **kwargs: Any) -> Any:
            return outputs

        def __call__(
            self, question: Any, choices: Sequence[Any] | None = None, batch_size: int | None = None, **kwargs: Any
        ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
            inner = getattr(self.model, "uncertainty_pipeline", None)
            if inner is None:
                raise UserError(
                    f"The task {TASK!r} takes a checkpoint's folder or Hub id as model, not a model object"
                )
            found = inner(question, choices, batch_size)
            if hasattr(found, "to_dict"):
                return found.to_dict()
            if isinstance(found, list):
                return [answer.to_dict() for answer in found]
            return (answer.to_dict() for answer in found)

    return MultipleChoiceUncertaintyPipeline


def register_pipeline() -> str:
    """
    Register the task with `transformers.pipeline`; returns its name.

    Example:

    ```python
    >>> pipe = transformers.pipeline(register_pipeline(), model="user/adapter")
    >>> pipe("Which of these is a fruit?", choices=["hammer", "plum"])["answer"]
    ```
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(TASK, _pipeline_class(), pt_model=(_Checkpoint,), type="text")
    return TASK
