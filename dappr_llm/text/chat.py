"""A tokenizer's own chat template around a prompt: the prompt is what the user says, the answer is read next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "\ue000message\ue000"  # private characters: no template treats them in a way of its own


def render_chat(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> tuple[str, str]:
    """
    What a chat template puts before and after the user's message, up to where the assistant's answer begins.

    The template is rendered once around a placeholder. So a text never passes through it, nothing in a text can act as
    a part of it, and a template that writes today's date gives the same prompt tomorrow.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            With a chat template.
        system (`str`, *optional*):
            The system message.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not tokenizer.chat_template:
        raise UserError(
            f"train.prompt.chat: the tokenizer of {name!r} has no chat template; leave chat out, or take the "
            "instruction-tuned version of the model"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": _PLACE})
    try:
        # Models that can think aloud answer at once with `enable_thinking=False`; other templates ignore it.
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except Exception as error:  # templates are programs, and some refuse a system message
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "; leave train.prompt.system out" if system else ""
        raise UserError(f"train.prompt.chat: the chat template of {name!r} fails: {reason}{hint}") from None
    before, _, after = str(text).partition(_PLACE)
    if text.count(_PLACE) != 1:
        raise UserError(f"train.prompt.chat: the chat template of {name!r} does not write the message exactly once")
    return before, after
