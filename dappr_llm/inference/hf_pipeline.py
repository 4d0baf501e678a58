"""The task `multiple-choice-uncertainty` of `transformers.pipeline`, a thin wrapper of `UncertaintyPipeline`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.files import read_json

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

        base = getattr(config, "_name_or_path", None)
        # What transformers found in the adapter's own files; the checkpoint says it too, and the commit with it.
        if not base or base in (name, _named_base(name)):
            base = None
        pipe = UncertaintyPipeline.from_pretrained(name, base, revision, dtype=dtype, device=kwargs.get("device"))
        pipe.run.model.uncertainty_pipeline = pipe  # type: ignore[assignment] # found again in `__call__`
        return pipe.run.model


def _named_base(name: str) -> str | None:
    """The base model that the adapter of a local folder names."""
    path = Path(name, "adapter_config.json")
    return read_json(path).get("base_model_name_or_path") if path.is_file() else None


def _keep_off_the_hub() -> None:
    """
    Let `transformers.pipeline` load no config for our task.

    Before it asks for a task's class, it loads the config of the base model that an adapter names: from the Hub, where
    the bundled model's original lies, though this task has no use for it. Other tasks get what they always get.
    """
    from transformers import AutoConfig, PretrainedConfig, pipelines

    class TaskConfig(AutoConfig):
        """`AutoConfig`, but for our task."""

        @classmethod
        def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("_from_pipeline") == TASK:
                return PretrainedConfig(name_or_path=str(name))
            return AutoConfig.from_pretrained(name, *args, **kwargs)

    pipelines.AutoConfig = TaskConfig  # type: ignore[misc]


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
        _keep_off_the_hub()
        PIPELINE_REGISTRY.register_pipeline(TASK, _pipeline_class(), pt_model=(_Checkpoint,), type="text")
    return TASK
