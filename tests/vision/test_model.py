"""The image classifier: what it is built of, what trains, and what a checkpoint brings back."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs, Prediction
from dappr_llm.methods import METHODS, HeadInfo
from dappr_llm.methods.base import Method
from dappr_llm.vision.backbones import build_backbone
from dappr_llm.vision.model import ImageClassifier, ImageClassifierConfig

VIT = {"backbone": "vit_tiny_patch16_224", "backbone_options": {"img_size": 16, "patch_size": 8, "depth": 2}}
KINDS = {
    "convnet": {"backbone": "convnet", "channels": 1},
    "resnet18": {"backbone": "resnet18", "stem": "small"},
    "vgg16": {
        "backbone": "vgg16_bn",
        "image_size": 32,
        "stem": "small",
        "hidden": [32, 16],
        "backbone_options": {"mlp_ratio": 0.01},
    },
    "vit": VIT,
}


def build(image_size=16, num_classes=5, **kwargs):
    torch.manual_seed(0)
    return ImageClassifier(ImageClassifierConfig(num_classes=num_classes, image_size=image_size, **kwargs))


def images(model, count=4):
    generator = torch.Generator().manual_seed(1)
    config = model.config
    return torch.rand(count, config.channels, config.image_size, config.image_size, generator=generator)


def step(model):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    cross_entropy(model(images(model)).logits, torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model.eval()(images(model)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_saved_and_loaded_whole(kind, tmp_path):
    from transformers import AutoModelForImageClassification

    model = build(**KINDS[kind], class_names=list("abcde"))
    before = logits(model)
    after = logits(step(model))
    assert after.shape == (4, 5) and after.dtype == torch.float32 and not torch.allclose(before, after)
    model.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, ImageClassifier) and not loaded.training
    assert torch.equal(logits(loaded), after)
    assert loaded.config.class_names == list("abcde")
    assert set(loaded.state_dict()) == set(model.state_dict())


def test_batch_statistics_are_saved(tmp_path):
    model = step(build(**KINDS["resnet18"]))
    model.save_pretrained(tmp_path)
    loaded = ImageClassifier.from_pretrained(tmp_path)
    assert model.backbone.bn1.running_mean.abs().sum() > 0
    assert torch.equal(loaded.backbone.bn1.running_mean, model.backbone.bn1.running_mean)
    assert loaded.backbone.bn1.num_batches_tracked == 1


def test_what_timm_computes_and_does_not_save_is_there_after_loading(tmp_path):
    model = build(
        image_size=32, backbone="swin_tiny_patch4_window7_224",
        backbone_options={"img_size": 32, "window_size": 2, "depths": (1, 1), "embed_dim": 12, "num_heads": (1, 2)},
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ImageClassifier.from_pretrained(tmp_path)), logits(model))


def test_the_convnet_is_the_papers():
    model = ImageClassifier(ImageClassifierConfig("convnet", channels=1, image_size=28))
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")]
    assert shapes == [(64, 1, 5, 5), (64, 64, 5, 5), (64, 64, 5, 5), (64, 576), (64, 64), (10, 64)]


def test_small_stems_keep_the_resolution():
    resnet = build_backbone("resnet18", 3, 32, "small")
    assert resnet.conv1.kernel_size == (3, 3) and resnet.conv1.stride == (1, 1)
    assert isinstance(resnet.maxpool, nn.Identity)
    assert resnet.forward_features(torch.rand(1, 3, 32, 32)).shape[-1] == 4
    with pytest.raises(UserError, match="stem"):
        build(**VIT, stem="small")
    with pytest.raises(UserError, match="did you mean 'small'"):
        build(backbone="resnet18", stem="smal")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet19"}, "resnet18"),
        ({"backbone": "vit_tiny_patch16_224"}, "img_size"),
        ({"backbone": "resnet18", "backbone_options": {"img_size": 16}}, "backbone_options"),
        ({"backbone": "convnet", "image_size": 4, "channels": 1}, "4 pixels"),
        ({"backbone": "convnet", "class_names": ["a"]}, "class names"),
        ({"backbone": "convnet", "channels": 1, "hidden": [10**9]}, "model.hidden"),
        ({"backbone": "convnet", "channels": "1"}, "model.channels"),
        ({"backbone": "convnet", "channels": 1, "dropout": float("nan")}, "model.dropout"),
        ({"backbone": "convnet", "channels": 1, "backbone_options": {"width": 10**9}}, "backbone_options.width"),
        ({"backbone": "convnet", "channels": 1, "backbone_options": {"width": "8"}}, "backbone_options.width"),
        ({**VIT, "backbone_options": {"img_size": 16, "patch_size": 0}}, "cannot be built"),
        ({**VIT, "lora": {"target_modules": "(a+)+$"}}, "lora.target_modules"),
        ({**VIT, "lora": {"r": 10**6}}, "lora.r"),
        ({**VIT, "lora": {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}}, "lora.megatron"),
    ],
)
def test_impossible_models_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_path": "evil.pth"},
        {"pretrained_cfg": {"file": "evil.pth"}},
        {"pretrained_cfg_overlay": {"url": "http://evil"}},
        {"cache_dir": "/etc"},
        {"features_only": True},
        {"pretrained": True},
        {"pretrained_strict": False},
        {"scriptable": True},
        {"block": "evil"},
        {"attn_layer": "evil"},
        {"drop_rat": 0.1},
        {"img_size": {"a": 1}},
        {"img_size": 10**9},
        {"global_pool": "x" * 1000},
        {"global_pool": "../../evil"},
        {"depths": [[[[1]]]]},
        {"drop_rate": float("nan")},
        {3: 4},
    ],
)
def test_options_that_load_files_or_code_are_refused(options, tmp_path, monkeypatch):
    import timm

    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    with pytest.raises(UserError, match="model.backbone_options"):
        build(backbone="resnet18", backbone_options=options)


@pytest.mark.parametrize(
    "name",
    [
        "hf-hub:someone/evil",
        "hf_hub:someone/evil",
        "local-dir:/evil",
        "HF-HUB:a/b",
        "../evil",
        "a b",
        "",
        3,
        "resnet18.a/b",
    ],
)
def test_names_that_load_files_or_repositories_are_refused(name, monkeypatch):
    import timm

    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    with pytest.raises(UserError, match="model.backbone"):
        build_backbone(name, 3, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"backbone_options": {"checkpoint_path": "evil.pth"}},
        {"backbone": "local-dir:/evil"},
        {"backbone_options": ["img_size"]},
        {"lora": {"target_modules": "(a+)+$"}},
        {"num_classes": "many"},
        {"num_classes": 10**12},
        {"hidden": 3},
        {"method": {"options": {}}},
        {"method": "dappr"},
        {"transform": 3},
        {"class_counts": ["x"]},
        {"image_size": -1},
        {"id2label": 7},
    ],
)
def test_a_checkpoints_config_is_not_trusted(change, tmp_path):
    import json

    build(**KINDS["resnet18"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="config.json"):
        ImageClassifier.from_pretrained(tmp_path)


def test_integer_weights_and_damaged_files_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    build(**KINDS["convnet"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"classifier.weight": weights["classifier.weight"].to(torch.int32)}, path)
    with pytest.raises(UserError, match="classifier.weight holds numbers of type torch.int32"):
        ImageClassifier.from_pretrained(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        ImageClassifier.from_pretrained(tmp_path)


@pytest.mark.parametrize("version", ["0.9.16", "1.0.15", "1.0.25", "1.0.25.dev0"])
def test_a_timm_that_loads_code_is_refused(version, monkeypatch):
    import timm

    monkeypatch.setattr(timm, "__version__", version)
    with pytest.raises(UserError, match=f"timm {version} is too old, 1.0.26 is needed"):
        build_backbone("resnet18", 3, 32)
    monkeypatch.setattr(timm, "__version__", "1.0.26")
    build_backbone("resnet18", 3, 32)


def test_a_frozen_backbone_does_not_move():
    model = build(**KINDS["resnet18"], frozen=True, hidden=[16, 8])
    before = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    head = model.classifier.weight.clone()
    step(model)
    assert all(torch.equal(before[key], value) for key, value in model.backbone.state_dict().items())
    assert not torch.equal(head, model.classifier.weight)
    assert model.feature_dim == 8


def test_lora_trains_a_few_parameters_of_a_vit(tmp_path):
    model = build(**VIT, lora={"r": 2, "lora_alpha": 4, "target_modules": ["qkv"]})
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"backbone", "classifier"}
    assert all("lora_" in name or name.startswith("classifier") for name in trained)
    after = logits(step(step(model)))
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ImageClassifier.from_pretrained(tmp_path)), after)
    with pytest.raises(UserError, match="lora"):
        build(**VIT, lora={"target_modules": ["nothing"]})


def test_dropout_stands_before_the_classifier_and_between_dense_layers():
    model = build(backbone="convnet", channels=1, hidden=[16, 8], dropout=0.5)
    assert sum(isinstance(layer, nn.Dropout) for layer in model.modules()) == 2
    model.train()
    x = images(model)
    assert not torch.equal(model(x).logits, model(x).logits)


def test_spectral_normalisation(tmp_path, monkeypatch):
    class Bounded(METHODS["ce"]):
        needs = frozenset({"spectral_norm"})

    monkeypatch.setitem(METHODS, "bounded", Bounded)
    model = build(**KINDS["convnet"], method={"name": "bounded"}, spectral_factor=3.0)
    for _ in range(5):
        model.train()(images(model))  # power iterations
    assert torch.linalg.matrix_norm(model.classifier.weight, 2).item() == pytest.approx(3.0, rel=0.05)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ImageClassifier.from_pretrained(tmp_path)), logits(model))


class Distance(nn.Module):
    def __init__(self, info: HeadInfo):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(info.num_classes, info.feature_dim))
        self.register_buffer("counts", torch.tensor(info.class_counts, dtype=torch.float32))

    def forward(self, features, logits):
        assert logits is None
        return {"distance": torch.cdist(features, self.centres) + 0 * self.counts}


class Nearest(Method):
    """A method that reads nothing but its head, and whose epistemic score follows from no probability."""

    needs = frozenset({"features", "input_grad"})

    def num_outputs(self, num_classes):
        return 0

    def build_head(self, info):
        return Distance(info)

    def loss(self, out, labels, progress):
        if out.inputs is not None:
            assert out.inputs.requires_grad
        return {"fit": cross_entropy(-out.head["distance"], labels, reduction="none")}

    def predict(self, out):
        distance = out.head["distance"]
        probs = (-distance).softmax(-1)
        return Prediction(probs, None, 1 - probs.amax(-1), 100 + distance.amin(-1))


def test_a_head_of_the_methods_own_trains_predicts_and_is_saved(tmp_path, monkeypatch):
    from dappr_llm import DAPPrConfig, DAPPrTrainer, load_checkpoint
    from dappr_llm.vision.backend import ImageBackend
    from dappr_llm.vision.data.tasks import load_image_task

    monkeypatch.setitem(METHODS, "nearest", Nearest)
    rows = load_image_task("digits", "train", limit=48)
    model = build(8, 10, backbone="convnet", channels=1, method={"name": "nearest"}, class_counts=[1] * 10)
    assert model.classifier is None and model.feature_dim == 64
    args = DAPPrConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=16, report_to="none", disable_tqdm=True,
        eval_strategy="steps", eval_steps=3, save_strategy="no",
    )  # fmt: skip
    trainer = DAPPrTrainer(model, args, rows, rows, method=Nearest(), backend=ImageBackend(model, Nearest()))
    trainer.train()
    assert "eval_accuracy" in trainer.state.log_history[-2]
    table = trainer.predict_table(rows)
    assert table.epistemic.min() > 100, "an uncertainty that no probability tells is kept"
    trainer.save_model(str(tmp_path))
    loaded = load_checkpoint(tmp_path)
    assert torch.equal(loaded.model.method_head.centres, model.method_head.centres)
    plain = DAPPrConfig(str(tmp_path), report_to="none", disable_tqdm=True)
    again = DAPPrTrainer(loaded.model, plain, method=Nearest(), backend=loaded.backend).predict_table(rows)
    assert (again.epistemic == table.epistemic).all()
    out = loaded.backend.read(loaded.model, loaded.backend.collate([loaded.backend.prepare(rows)[0]]))
    assert isinstance(out, Outputs) and out.features.shape == (1, 64) and out.inputs is None
