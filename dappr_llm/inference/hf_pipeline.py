"""`transformers.pipeline("multiple-choice-uncertainty", model="user/adapter")`, for those who live in that API."""

from __future__ import annotations

from typing import Any

from ..core.errors import UserError

TASK = "multiple-choice-uncertainty"


class _Checkpoint:
    """Stands where transformers expects a model class: loads the checkpoint whole, adapter, rule and all."""

    @classmethod
    def from_pretrained(
        cls, name: str, revision: str | None = None, dtype: Any = "auto", config: Any = None, **kwargs: Any
    ) -> Any:
        from .pipeline import UncertaintyPipeline

        # transformers has already found the base model's config, and so knows where the base is.
        base = getattr(config, "_name_or_path", None) or None
        pipe = UncertaintyPipeline.from_pretrained(name, base, revision, dtype=dtype, device=kwargs.get("device"))
        pipe.run.model.uncertainty_pipeline = pipe
        return pipe.run.model


def _pipeline_class() -> Any:
    import transformers

    class MultipleChoiceUncertaintyPipeline(transformers.Pipeline):
        """Answers as dictionaries, in the manner of `transformers` pipelines."""

        _load_tokenizer = False
        _load_processor = False
        _load_image_processor = False
        _load_feature_extractor = False
        _load_video_processor = False

        def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
            return {}, {}, {}

        def preprocess(self, inputs: Any, **kwargs: Any) -> Any:
            return inputs

        def _forward(self, inputs: Any, **kwargs: Any) -> Any:
            return self.model.uncertainty_pipeline(**inputs)

        def postprocess(self, outputs: Any, **kwargs: Any) -> Any:
            return outputs

        def __call__(self, question: Any, choices: Any = None, batch_size: int | None = None, **kwargs: Any) -> Any:
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
    Make the task known to `transformers.pipeline`; returns its name.

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
