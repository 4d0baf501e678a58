"""Sections of a recipe hold what the classes behind them take, and errors name key, value and the nearest form."""

import subprocess
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import load_recipe
from dappr_llm.core.schemas import check, lora_section, method_options, train_section
from dappr_llm.core.schemas.recipe import ModelSection, TaskDescription
from dappr_llm.methods import METHODS


def keys(schema):
    return set(get_type_hints(schema))


def test_train_section_holds_the_fields_of_the_training_arguments():
    from dappr_llm.training.config import DAPPrConfig

    assert keys(train_section.TrainSection) == {f.name for f in fields(DAPPrConfig) if f.init}


def test_choices_are_those_of_transformers():
    from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    hints = get_type_hints(train_section.TrainSection)
    for key, kind in (
        ("lr_scheduler_type", SchedulerType),
        ("optim", OptimizerNames),
        ("eval_strategy", IntervalStrategy),
        ("logging_strategy", IntervalStrategy),
        ("save_strategy", SaveStrategy),
        ("hub_strategy", HubStrategy),
    ):
        assert set(get_args(hints[key])) == {entry.value for entry in kind}, key


def test_the_arguments_defaults_are_valid(tmp_path):
    from dappr_llm.training.config import DAPPrConfig

    own = {name: getattr(DAPPrConfig(output_dir=str(tmp_path)), name) for name in keys(train_section.OwnArguments)}
    check(train_section.OwnArguments, own, "defaults")


def test_lora_section_holds_the_fields_of_peft():
    from peft import LoraConfig

    assert keys(lora_section.LoraSection) == {f.name for f in fields(LoraConfig)}


def test_every_method_has_the_schema_of_its_options():
    assert set(method_options.METHOD_OPTIONS) == set(METHODS)
    for name, build in METHODS.items():
        assert build().schema is method_options.METHOD_OPTIONS[name]
        assert set(build().options()) == keys(build().schema)


def test_prompts_and_tasks_hold_the_fields_of_their_classes():
    from dappr_llm.text.data.registry import TASK_KEYS
    from dappr_llm.text.prompt import Prompt
    from dappr_llm.vision.data.catalogue import ImageTask

    assert keys(train_section.PromptSection) == {f.name for f in fields(Prompt)} - {"rendered"}
    assert keys(TaskDescription) == TASK_KEYS | {f.name for f in fields(ImageTask)} | {"task"}


def test_model_section_holds_the_fields_of_the_image_classifier():
    import inspect

    from dappr_llm.vision.model import ImageClassifierConfig

    theirs = set(inspect.signature(ImageClassifierConfig).parameters)
    ours = {"backbone", "stem", "hidden", "dropout", "frozen", "image_size", "channels", "backbone_options"}
    assert ours <= theirs and ours <= set(ModelSection.model_fields)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("train.learning_rate=fast", r"train.learning_rate is 'fast'; allowed: a number of at least 0"),
        ("train.learning_rate='2e-4'", r"did you mean 0.0002 \(without quotes\)\?"),
        ("train.learning_rate=.nan", r"train.learning_rate is nan"),
        ("train.learning_rate=.inf", r"train.learning_rate is inf"),
        ("train.lr_scheduler_type=cosin", r"did you mean cosine"),
        ("train.optim=adamw_troch", r"is 'adamw_troch'; did you mean adamw_torch"),
        ("train.bf16=yes", r"train.bf16 is 'yes'; allowed: true or false; did you mean true\?"),
        ("train.max_steps=1e3", r"did you mean 1000\?"),
        ("train.seed=-1", r"train.seed is -1; allowed: a whole number of at least 0"),
        ("train.epoch_schedule={kind: stp}", r"train.epoch_schedule.kind is 'stp'; did you mean 'step'"),
        ("train.epoch_schedule={kind: step, evry: 3}", r"unknown key 'train.epoch_schedule.evry'.*'every'"),
        ("train.prompt={instruction: 3}", r"train.prompt.instruction is 3; allowed: a text"),
        ("train.parallelism_config={}", r"train.parallelism_config is {}; allowed: null"),
        ("train.optim_args=foo", r"train.optim_args is 'foo': 'foo' is not of the form name=value"),
        ("train.optim_args='rank=8,'", r"train.optim_args is 'rank=8,': '' is not of the form name=value"),
        ("train.optim_args='a=b=c'", r"train.optim_args is 'a=b=c': 'a=b=c' is not of the form name=value"),
        ("train.remove_unused_columns=true", r"train.remove_unused_columns is True; allowed: false"),
        ("data.ood=arc_c", r"data.ood is 'arc_c'; allowed: a list; did you mean \[arc_c\]"),
        ("data.ood=[{path: x, name: 3}]", r"data.ood.0.name is 3; allowed: a text"),
        ("data.train={path: x, qestion: y}", r"unknown key 'data.train.qestion'; did you mean 'question'"),
        ("data.max_train_samples=0", r"data.max_train_samples is 0; allowed: a whole number of at least 1 or null"),
        ("data.naming_share=2", r"data.naming_share is 2; allowed: a number of at least 0 and at most 1"),
        ("model.dtype=bfloat61", r"model.dtype is 'bfloat61'; .*did you mean bfloat16"),
        ("lora.rank=8", r"unknown key 'lora.rank'; did you mean 'r'\?"),
        ("lora.alpha=8", r"unknown key 'lora.alpha'; did you mean 'lora_alpha'\?"),
        ("lora.dropout=0.1", r"unknown key 'lora.dropout'; did you mean 'lora_dropout'\?"),
        ("train.lr=1e-4", r"unknown key 'train.lr'; did you mean 'learning_rate'\?"),
        ("train.epochs=3", r"unknown key 'train.epochs'; did you mean 'num_train_epochs'\?"),
        ("train.batch_size=8", r"unknown key 'train.batch_size'; did you mean 'per_device_train_batch_size'\?"),
        ("model.torch_dtype=auto", r"unknown key 'model.torch_dtype'; did you mean 'dtype'\?"),
        ("training={}", r"unknown key 'training'; did you mean 'train'\?"),
        ("lora.megatron_config={a: 1}", r"lora.megatron_config is {'a': 1}: models that Megatron splits.*remove it"),
        ("lora.megatron_core=megatron.core", r"lora.megatron_core is 'megatron.core': models that Megatron"),
        ("model.name=smollm-135m", r"model.name is 'smollm-135m': no folder .*did you mean 'smollm2-135m'"),
        ("model.name=smollm2", r"model.name is 'smollm2': no folder .*did you mean 'smollm2-135m'"),
        ("model.name=SmolLM2-135M", r"model.name is 'SmolLM2-135M': no folder .*did you mean 'smollm2-135m'"),
        ('model.name="a\\0b"', r"model.name is .*control character"),
        ("lora.trainable_token_indices=[]", r"lora.trainable_token_indices"),
        ("lora.r=100000", r"lora.r is 100000; allowed: a whole number of at least 1 and at most 4096"),
        ("lora.target_modules=(a+)+x", r"lora.target_modules is .*could take for ever"),
        ("lora.init_lora_weights=gausian", r"lora.init_lora_weights is 'gausian'.*gaussian"),
        ("method.name=dapr", r"method.name is 'dapr'; did you mean 'dappr'"),
        ("method.reg_weight=-1", r"method.reg_weight is -1; allowed: a number of at least 0"),
        ("method={}", r"needs a name"),
        ("train=3", r"the section 'train' must be a mapping, found 3"),
        ("nonsense=1", r"unknown key 'nonsense'; did you mean"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(setting, words):
    with pytest.raises(UserError, match=words) as caught:
        load_recipe("quickstart", [setting])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_key_of_a_later_transformers_is_left_to_it(monkeypatch):
    from dappr_llm.core.schemas import sections

    monkeypatch.setattr(sections, "_fields", lambda *_: frozenset({"brand_new"}))
    assert load_recipe("quickstart", ["train.brand_new=3"]).train["brand_new"] == 3


def test_a_bad_value_is_found_before_anything_slow_is_imported():
    code = (
        "import sys\nfrom dappr_llm.commands.main import main\n"
        "code = main(['train', 'quickstart', '--set', 'train.learning_rate=fast'])\n"
        "print(code, sorted({'torch', 'transformers', 'datasets', 'peft', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []" and "train.learning_rate is 'fast'" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"optim_args": "foo"},
        {"remove_unused_columns": True},
        {"dataloader_multiprocessing_context": "fork"},
        {"dataloader_persistent_workers": True},
        {"dataloader_prefetch_factor": 2},
    ],
)
def test_a_script_gets_the_same_refusal(tmp_path, settings):
    from dappr_llm.training.config import DAPPrConfig

    with pytest.raises(UserError, match=next(iter(settings))):
        DAPPrConfig(output_dir=str(tmp_path), **settings)


def test_arguments_of_an_optimizer_are_split_as_transformers_does():
    from transformers.trainer_optimizer import _parse_optim_args

    text = load_recipe("quickstart", ["train.optim_args='rank=8, scale=0.5'"]).train["optim_args"]
    assert _parse_optim_args(text) == {"rank": "8", "scale": "0.5"}


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "HuggingFaceTB/SmolLM2-135M", "owner/smollm2"])
def test_other_models_names_are_left_to_the_hub(name):
    assert load_recipe("quickstart", [f"model.name={name}"]).model.name == name


def test_a_folder_may_be_called_like_the_bundled_model(tmp_path, monkeypatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart", ["model.name=smollm2"]).model.name == "smollm2"


@pytest.mark.parametrize(
    "given, name", [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("torch.bfloat16", "bfloat16")]
)
def test_dtypes_by_their_short_names(given, name):
    import torch

    from dappr_llm.text.lm import quantization_config
    from dappr_llm.text.precision import resolve_dtype

    assert load_recipe("quickstart", [f"model.dtype={given}"]).model.dtype == name
    assert resolve_dtype(given) is getattr(torch, name)
    pytest.importorskip("bitsandbytes")
    options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": given, "bnb_4bit_quant_storage": given}
    found = quantization_config(options)
    assert found.bnb_4bit_compute_dtype is found.bnb_4bit_quant_storage is getattr(torch, name)


def test_every_synonym_leads_to_a_key():
    from dappr_llm.core.schemas import synonyms
    from dappr_llm.core.schemas.recipe import Recipe

    valid = keys(lora_section.LoraSection) | keys(train_section.TrainSection)
    valid |= set(ModelSection.model_fields) | set(Recipe.model_fields)
    assert set(synonyms._KEYS.values()) <= valid and not set(synonyms._DTYPES) & set(synonyms._DTYPES.values())


def test_keys_of_the_section_itself_come_first():
    assert load_recipe("digits/dappr", ["model.dropout=0.5"]).model.dropout == 0.5
    with pytest.raises(UserError, match="unknown key 'model.rank'; valid:"):
        load_recipe("quickstart", ["model.rank=0.5"])
