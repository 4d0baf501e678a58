"""From an image recipe to rows: unreadable files stop a run before its first step, all of them named."""

import os

import pytest
from pictures import class_folders, save

from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import build_recipe
from dappr_llm.vision.build import build_data, build_task
from dappr_llm.vision.data import rows as rows_module
from dappr_llm.vision.data.rows import ImageRows


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "validation", "test"):
        class_folders(tmp_path / "images" / split, ["cat", "dog"], each=4)
    return tmp_path / "images"


def data_of(folder):
    recipe = build_recipe({"data": {"train": {"path": str(folder)}}, "model": {"backbone": "convnet"}})
    return build_data(recipe, build_task(recipe), seed=0)


def break_two(folder):
    whole = save(folder / "train" / "cat" / "cut.png").read_bytes()
    (folder / "train" / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "dog" / "text.jpg").write_text("<html>404</html>")


def test_unreadable_images_are_named_before_training(folder, tmp_path, capsys):
    recipe = tmp_path / "cats.yaml"
    recipe.write_text(
        f"data: {{train: {{path: {folder}}}}}\nmodel: {{backbone: convnet, image_size: 16}}\nmethod: {{name: dappr}}\n"
        f"train: {{output_dir: {tmp_path / 'run'}, max_steps: 1, report_to: none, save_strategy: 'no'}}\n"
    )
    break_two(folder)
    assert main(["train", str(recipe)]) != 0
    shown = capsys.readouterr().err
    assert "2 unreadable images" in shown and "cut.png: not a readable image" in shown and "text.jpg" in shown
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_validation_images_are_verified_too(folder):
    (folder / "validation" / "cat" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"validation: 1 unreadable image:\n.*validation/cat/0.png"):
        data_of(folder)


def test_many_unreadable_images_are_not_all_named(folder):
    for i in range(15):
        (folder / "train" / "cat" / f"bad{i}.png").write_bytes(b"")
    with pytest.raises(UserError, match="at least 10 unreadable images") as error:
        data_of(folder)
    assert str(error.value).count("not a readable image") == 10


def test_a_verified_set_is_decoded_once_until_a_file_changes(folder, monkeypatch):
    checked = []
    decode_all = rows_module._unreadable
    monkeypatch.setattr(
        rows_module, "_unreadable", lambda images, *rest: checked.append(len(images)) or decode_all(images, *rest)
    )
    train, validation = data_of(folder)
    assert checked == [len(train), len(validation)] == [8, 8]
    data_of(folder)
    assert checked == [8, 8], "nothing has changed since"
    path = folder / "train" / "dog" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="dog/1.png"):
        data_of(folder)
    with pytest.raises(UserError, match="dog/1.png"):  # what has failed is not remembered
        data_of(folder)
    assert checked == [8, 8, 8, 8]


def test_rows_of_a_dataset_are_verified_and_remembered(tmp_path):
    from datasets import Dataset, Features, Image, Value

    from dappr_llm.vision.data.images import HubImages

    features = Features({"image": Image(), "label": Value("int64")})
    good = save(tmp_path / "good.png").read_bytes()
    dataset = Dataset.from_dict(
        {"image": [{"bytes": b, "path": None} for b in (good, good[:90])], "label": [0, 1]}, features
    )
    rows = ImageRows(HubImages(dataset, "image", "mine"), [0, 1], ["a", "b"])
    with pytest.raises(UserError, match="mine, row 1: not a readable image"):
        rows.verify()
    rows.select([0]).verify()
    assert len(os.listdir(tmp_path / "cache" / "verified_images")) == 1
    assert rows.images.fingerprint() != rows.select([0]).images.fingerprint()


def test_only_the_main_process_verifies(folder, monkeypatch):
    break_two(folder)
    monkeypatch.setenv("RANK", "1")
    data_of(folder)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="2 unreadable images"):
        data_of(folder)


def test_a_read_only_cache_is_no_error(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DAPPR_CACHE", str(tmp_path / "file"))
    data_of(folder)
