"""Names and descriptions of image tasks, how rows are divided, own folders, and what a DataLoader gets."""

import dataclasses
import os

import numpy as np
import pytest
from pictures import class_folders, noise, save, write_idx
from PIL import Image

from dappr_llm.core.errors import UserError
from dappr_llm.vision.data.rows import ImageRows, collate_rows
from dappr_llm.vision.data.seeded_random import draws, shuffled
from dappr_llm.vision.data.splits import divide, long_tail, tail_counts
from dappr_llm.vision.data.tasks import IMAGE_TASKS, ImageTask, get_image_task, is_image_task, load_image_task
from dappr_llm.vision.transforms import build_transform

CLASSES = ["ant", "bee", "cow"]


# Names and descriptions


def test_the_papers_sets_are_there():
    names = [
        "mnist",
        "kmnist",
        "fashion_mnist",
        "cifar10",
        "cifar10_lt_001",
        "cifar10_lt_01",
        "cifar100",
        "svhn",
        "tinyimagenet",
        "cub",
        "dogs",
        "imagenet",
        "imagenet_o",
        "dtd",
        "places365",
        "cifar10_c",
        "digits",
    ]
    assert set(names) <= set(IMAGE_TASKS)
    classes = {"cifar100": 100, "cub": 200, "dogs": 120, "tinyimagenet": 200, "imagenet": 1000, "mnist": 10}
    assert {name: IMAGE_TASKS[name].num_classes for name in classes} == classes


def test_which_descriptions_mean_images(tmp_path):
    class_folders(tmp_path / "pets", CLASSES, each=1)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "rows.jsonl").write_text("{}")
    yes = ["mnist", "cifar10_c/fog/1", str(tmp_path / "pets"), "some.npz", {"path": str(tmp_path / "pets")},
           {"path": "org/name", "image": "img"}, {"task": "mnist", "mean": [0.1]}, {"splits": {"train": "a.npz"}},
           IMAGE_TASKS["digits"]]  # fmt: skip
    no = ["obqa", "everyday", "org/name", "rows.jsonl", str(tmp_path / "texts"), {"path": "org/name"}, None, 3,
          {"path": "rows.parquet", "question": "q"}, {"splits": {"train": "a.jsonl"}}]  # fmt: skip
    assert all(map(is_image_task, yes)) and not any(map(is_image_task, no))


def test_a_description_starts_from_a_known_task():
    task = get_image_task({"task": "mnist", "name": "mine", "mean": [0.1307], "std": [0.3081]})
    assert task == dataclasses.replace(IMAGE_TASKS["mnist"], name="mine", mean=(0.1307,), std=(0.3081,))
    assert get_image_task(task) is task and get_image_task("mnist") is IMAGE_TASKS["mnist"]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("mnst", "did you mean 'mnist'"),
        ({"task": "mnist", "chanels": 3}, "Unknown key 'chanels'.*'channels'"),
        ({"name": "x"}, "needs `task`"),
        ({"task": "mnist", "validation_rule": "randm"}, "'random'"),
        ({"task": "mnist", "validation_fraction": 1.5}, "validation_fraction must be between 0 and 1"),
        ({"task": "mnist", "class_names": ["a"]}, "1 class_names for 10 classes"),
        ({"path": "pets", "size": "big"}, "size in the task description must be a whole number, got 'big'"),
        ({"path": "pets", "augment": "flip"}, "augment in the task description must be a list"),
        ({"splits": ["a.npz"]}, "splits in the task description must be a mapping"),
        ({"path": ""}, "needs `task`"),
        ({"task": "mnist", "layout": "cubs"}, "'cub'"),
        (["mnist"], "a name or a mapping, not list"),
    ],
)
def test_wrong_descriptions(spec, words):
    with pytest.raises(UserError, match=words):
        get_image_task(spec)


def test_missing_places(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        load_image_task("mnist", "train", root=tmp_path / "nowhere")
    with pytest.raises(UserError, match="No mnist under .*MNIST"):
        load_image_task("mnist", "train", root=tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_image_task({"path": str(tmp_path / "pets"), "image": "x"}, "train")
    with pytest.raises(UserError, match="some.npz: no such file"):
        load_image_task("some.npz", "train")


def test_the_environment_names_the_root(tmp_path, monkeypatch):
    write_idx(tmp_path / "mnist", "t10k", noise(2, 28, 28), np.arange(2))
    monkeypatch.setenv("DAPPR_DATA_ROOT", str(tmp_path))
    assert len(load_image_task("mnist", "test")) == 2


# Dividing rows


def test_sizes_of_the_papers_splits():
    """48000/12000, 47500/2500, 5394/600 and 10800/1200; long tails of 19409/1022 and 11785/621."""
    for total, fraction, kept in [
        (60000, 0.2, 48000), (50000, 0.05, 47500), (5994, 0.1, 5394), (12000, 0.1, 10800), (20431, 0.05, 19409),
        (12406, 0.05, 11785),
    ]:  # fmt: skip
        labels = np.arange(total) % 10
        for rule in ("random", "stratified"):
            train, held = divide(labels, fraction, rule, seed=3)
            assert (len(train), len(held)) == (kept, total - kept)
            assert sorted([*train, *held]) == list(range(total)) and (np.diff(held) > 0).all()


def test_counts_of_the_long_tails():
    assert tail_counts(5000, 10, 0.1) == [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]
    assert tail_counts(5000, 10, 0.01) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    labels = np.repeat(np.arange(10), 500)
    first, again, other = (long_tail(labels, 10, 0.01, seed) for seed in (0, 0, 1))
    assert np.bincount(labels[first]).tolist() == tail_counts(500, 10, 0.01)
    assert (first == again).all() and set(first) != set(other)
    with pytest.raises(UserError, match="tail/head"):
        tail_counts(5000, 10, 100)


def test_a_long_tailed_task_is_tested_on_all_classes_alike(tmp_path):
    (tmp_path / "cifar10").mkdir()
    labels = np.repeat(np.arange(10), 100)
    for split in ("train", "test"):
        np.savez(tmp_path / "cifar10" / f"{split}.npz", images=noise(1000, 32, 32, 3), labels=labels)
    train, validation, test = (
        load_image_task("cifar10_lt_001", s, tmp_path, seed=1) for s in ("train", "validation", "test")
    )
    assert (train.class_counts() + validation.class_counts()).tolist() == tail_counts(100, 10, 0.01)
    assert test.class_counts().tolist() == [100] * 10 and not set(train.ids) & set(validation.ids)
    own = load_image_task({"task": "cifar10", "imbalance": 0.5}, "train", tmp_path)
    assert own.class_counts()[0] > 80 and own.class_counts()[9] < 60


def test_stratified_shares_differ_by_one_at_the_most():
    labels = np.repeat([0, 1, 2], [70, 23, 7])
    _, held = divide(labels, 0.1, "stratified", seed=0)
    assert np.bincount(labels[held]).tolist() == [7, 2, 1]


def test_splits_depend_on_the_seed_and_test_rows_do_not(tmp_path):
    write_idx(tmp_path / "mnist", "train", noise(200, 28, 28), np.arange(200) % 10)
    write_idx(tmp_path / "mnist", "t10k", noise(50, 28, 28), np.arange(50) % 10)
    ids = [set(load_image_task("mnist", "validation", tmp_path, seed=seed).ids) for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]
    tests = [load_image_task("mnist", "test", tmp_path, limit=20, seed=seed).ids for seed in (0, 1)]
    assert tests[0] == tests[1] and len(tests[0]) == 20
    small, large = (load_image_task("mnist", "train", tmp_path, limit=n, seed=4) for n in (10, 60))
    assert set(small.ids) < set(large.ids) and len(large) == 60 and large.num_classes == 10
    with pytest.raises(UserError, match="at least 1"):
        load_image_task("mnist", "train", tmp_path, limit=0)


def test_chance_is_fixed_for_ever():
    """Golden: splits and crops of published runs must not move."""
    assert shuffled(8, seed=0).tolist() == [7, 1, 6, 4, 0, 3, 2, 5]
    golden = [0.4541290122588759, 0.22611085363756545, 0.07196965864184235, 0.7031811768436373]
    assert draws(np.array([0, 5]), 2, seed=1, epoch=2).ravel().tolist() == pytest.approx(golden, abs=1e-12)
    many = draws(np.arange(20000), 3, seed=7)
    assert many.min() >= 0 and many.max() < 1 and np.allclose(many.mean(0), 0.5, atol=0.01)
    assert np.allclose(np.corrcoef(many.T), np.eye(3), atol=0.03)
    assert abs(np.corrcoef(many[:-1, 0], many[1:, 0])[0, 1]) < 0.03


# Bundled sets


def test_digits_need_nothing(monkeypatch):
    monkeypatch.setenv("DAPPR_DATA_ROOT", "/nowhere")
    train, validation, test = (load_image_task("digits", s, seed=9) for s in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (1077, 270, 450)
    assert not set(train.ids) & set(test.ids) and not set(validation.ids) & set(train.ids + test.ids)
    assert train.ids == load_image_task("digits", "train", seed=0).ids
    assert min(test.class_counts()) > 40 and train[0]["pixel_values"].shape == (1, 8, 8)
    for name, count in (("digits_letters", 850), ("digits_photos", 500)):
        strange = load_image_task(name, "test", labelled=False)
        assert len(strange) == count and strange.images.batch(np.arange(count)).std() > 20
        assert len(np.unique(strange.images.batch(np.arange(count)), axis=0)) > 0.95 * count
    letters = load_image_task("digits_letters", "test").images.batch(np.arange(850))
    ink = test.images.batch(np.arange(450)).mean()
    assert abs(letters.mean() - ink) < 0.25 * ink  # not to be told apart by brightness
    with pytest.raises(UserError, match="no split 'dev'"):
        load_image_task("digits", "dev")


# Own folders


def test_own_folder_without_splits(tmp_path):
    class_folders(tmp_path / "pets", CLASSES, each=20)
    (tmp_path / "pets" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / ".git").mkdir()
    spec = {"path": str(tmp_path / "pets")}
    found = {split: load_image_task(spec, split) for split in ("train", "validation", "test")}
    assert [len(rows) for rows in found.values()] == [43, 5, 12]
    assert found["test"].class_counts().tolist() == [4, 4, 4] and max(found["validation"].class_counts()) == 2
    assert len({i for rows in found.values() for i in rows.ids}) == 60
    assert found["test"].class_names == CLASSES and found["test"].ids[0].startswith("ant/")
    assert found["test"].ids == load_image_task(spec, "test", seed=1).ids
    assert len(load_image_task({**spec, "whole": True}, "test")) == 60
    task = get_image_task(str(tmp_path / "pets"))
    assert (task.name, task.size, task.resize) == ("pets", 224, 256)


def test_own_folder_with_splits(tmp_path):
    class_folders(tmp_path / "train", CLASSES, each=10)
    class_folders(tmp_path / "test", CLASSES[1:], each=2)
    spec = {"path": str(tmp_path), "size": 64}
    assert [len(load_image_task(spec, s)) for s in ("train", "validation", "test")] == [27, 3, 4]
    test = load_image_task(spec, "test")
    assert test.labels.tolist() == [1, 1, 2, 2] and test.num_classes == 3  # numbered as in training
    assert get_image_task(spec).resize == 73
    class_folders(tmp_path / "val", CLASSES, each=1)  # from now on nothing is held out
    assert [len(load_image_task(spec, s)) for s in ("train", "validation", "test")] == [30, 3, 4]
    save(tmp_path / "test" / "dog" / "0.png")
    with pytest.raises(UserError, match="dog: a class that training does not have; it has ant, bee, cow"):
        load_image_task(spec, "test")
    (tmp_path / "train" / "eel").mkdir()
    with pytest.raises(UserError, match="eel: a class without images"):
        load_image_task(spec, "train")


def test_images_without_classes_serve_as_ood(tmp_path):
    for i in range(3):
        save(tmp_path / f"{i}.png")
    rows = load_image_task(str(tmp_path), "test", labelled=False)
    assert rows.labels.tolist() == [-1] * 3 and rows.ids == ["0.png", "1.png", "2.png"]
    with pytest.raises(UserError, match="0.png: the image has no label"):
        load_image_task(str(tmp_path), "test")


def test_images_of_every_kind(tmp_path):
    """Grey, palette, transparent, deep, tiny and turned ones: all become 8-bit grey or RGB."""
    kinds = {
        "bits": Image.fromarray(noise(5, 5)).convert("1"),
        "cmyk": Image.fromarray(noise(5, 5, 3)).convert("CMYK"),
        "deep": Image.fromarray(np.full((5, 5), 51200, np.uint16)),
        "grey": Image.fromarray(noise(5, 5)),
        "grey_alpha": Image.fromarray(noise(5, 5, 2), "LA"),
        "one": Image.fromarray(noise(1, 1, 3)),
        "palette": Image.fromarray(noise(5, 5, 3)).convert("P"),
        "rgba": Image.fromarray(np.dstack([noise(5, 5, 3), np.zeros((5, 5), np.uint8)])),
        "turned": Image.fromarray(noise(4, 7, 3)),
    }
    folder = tmp_path / "all"
    folder.mkdir()
    for name, image in kinds.items():
        options = {}
        if name == "turned":
            options["exif"] = image.getexif()
            options["exif"][0x0112] = 6
        image.save(folder / f"{name}.{'tif' if name == 'cmyk' else 'png'}", **options)
    rows = load_image_task({"path": str(tmp_path), "whole": True}, "test")
    found = {name.split("/")[1].split(".")[0]: rows.load(i) for i, name in enumerate(rows.ids)}
    assert {image.mode for image in found.values()} == {"L", "RGB"} and set(found) == set(kinds)
    assert (np.asarray(found["deep"]) == 200).all()
    assert (np.asarray(found["rgba"]) == 255).all()  # nothing there: white
    assert found["turned"].size == (4, 7)
    assert (np.asarray(found["palette"]) == np.asarray(kinds["palette"].convert("RGB"))).all()
    for size in (8, 224):
        batch = rows.with_transform(build_transform(get_image_task("cub"), train=True, size=size)).__getitems__(
            range(9)
        )
        assert collate_rows(batch)["pixel_values"].shape == (9, 3, size, size)
    rows.verify()


def test_bad_images_are_named(tmp_path):
    good = save(tmp_path / "a" / "0.jpg", noise(64, 64, 3))
    (tmp_path / "a" / "1.jpg").write_bytes(good.read_bytes()[:900])
    (tmp_path / "a" / "2.png").write_bytes(b"")
    (tmp_path / "a" / "3.png").write_text("<html>404</html>")
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "a" / "4.tif")
    save(tmp_path / "a" / "5.png", np.zeros((1, 3000, 3), np.uint8))
    rows = load_image_task({"path": str(tmp_path), "whole": True}, "test")
    rows = rows.with_transform(build_transform(get_image_task("cub")))
    for i, words in ((1, "1.jpg.*truncated"), (2, "2.png: not a readable image"), (3, "3.png: not a readable"),
                     (4, "4.tif: floating-point"), (5, "5.png: 3000 × 1 pixels are too narrow")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            rows.__getitems__([0, i])
    with pytest.raises(UserError, match=r"test: 4 unreadable images:(.|\n)*1.jpg(.|\n)*2.png(.|\n)*4.tif"):
        rows.verify()
    (tmp_path / "a" / "0.jpg").unlink()
    with pytest.raises(UserError, match="0.jpg: no such image file"):
        rows[0]


# Rows


@pytest.fixture
def rows():
    from dappr_llm.vision.data.images import ArrayImages

    images = ArrayImages(noise(30, 8, 8), "noise")
    return ImageRows(images, np.arange(30) % 3, [f"r{i}" for i in range(30)], CLASSES)


def test_rows(rows):
    import torch

    assert len(rows) == 30 and rows[29]["row"] == 29 and rows[-1]["row"] == 29 and rows.labels.dtype == np.int64
    assert (
        rows[4]["labels"] == 1 and isinstance(rows[4]["labels"], int) and rows[4]["pixel_values"].dtype == torch.uint8
    )
    with pytest.raises(IndexError):
        rows[30]
    few = rows.select([7, 3, 3])
    assert few.ids == ["r7", "r3", "r3"] and [row["row"] for row in few] == [0, 1, 2]
    assert torch.equal(few[0]["pixel_values"], rows[7]["pixel_values"])
    assert few.select([1]).ids == ["r3"] and few.class_names == CLASSES
    assert rows.without_labels().labels.max() == -1 and rows.labels.max() == 2
    with pytest.raises(UserError, match="30 images, 2 labels"):
        ImageRows(rows.images, np.arange(2), rows.ids)


def test_a_batch_equals_its_rows(rows):
    import torch

    task = ImageTask("noise", channels=1, size=8, mean=(0.5,), std=(0.5,), augment=("crop", "flip", "rotate"))
    rows = rows.with_transform(build_transform(task, train=True))
    rows.set_epoch(3)
    batch = rows.__getitems__([5, 1, 9])
    assert len(batch) == 3 and [row["row"] for row in batch] == [5, 1, 9] and batch[:2][1]["labels"] == 1
    one_by_one = collate_rows([rows[i] for i in (5, 1, 9)])
    together = collate_rows(batch)
    assert together.keys() == one_by_one.keys() == {"pixel_values", "labels", "row"}
    assert all(torch.equal(together[key], one_by_one[key]) for key in together)


def test_files_and_arrays_give_the_same_pixels(tmp_path):
    import torch

    class_folders(tmp_path / "files", CLASSES)
    files = load_image_task({"path": str(tmp_path / "files"), "whole": True}, "test")
    images = np.stack([np.asarray(files.load(i)) for i in range(9)])
    np.savez(tmp_path / "all.npz", images=images, labels=files.labels)
    arrays = load_image_task({"path": str(tmp_path / "all.npz"), "whole": True}, "test")
    transform = build_transform(get_image_task("cub"), train=True, size=20, augment=["crop", "flip"])
    found = []
    for rows in (files, arrays):
        rows = rows.with_transform(transform)
        rows.set_epoch(1)
        found.append(collate_rows(rows.__getitems__(range(9))))
    assert torch.equal(found[0]["pixel_values"], found[1]["pixel_values"])


def test_augmentation_depends_on_epoch_and_row_but_not_on_workers(rows):
    import torch
    from torch.utils.data import DataLoader

    task = ImageTask("noise", channels=1, size=8, mean=(0.0,), std=(1.0,), augment=("crop", "flip"))
    rows = rows.with_transform(build_transform(task, train=True))

    def epoch(number, workers=0, size=10):
        rows.set_epoch(number)
        loader = DataLoader(rows, batch_size=size, num_workers=workers, collate_fn=collate_rows)
        return torch.cat([batch["pixel_values"] for batch in loader])

    assert torch.equal(epoch(0), epoch(0, workers=2, size=7)) and not torch.equal(epoch(0), epoch(1))
    plain = rows.with_transform(rows.transform)  # nobody counts its epochs
    torch.manual_seed(0)
    first, second = plain[0]["pixel_values"], torch.stack([plain[0]["pixel_values"] for _ in range(8)])
    torch.manual_seed(0)
    assert torch.equal(first, plain[0]["pixel_values"]) and not (second == second[0]).all()


def test_persistent_workers_see_the_epoch(rows):
    import torch
    from torch.utils.data import DataLoader

    task = ImageTask("noise", channels=1, size=8, mean=(0.0,), std=(1.0,), augment=("crop", "flip"))
    rows = rows.with_transform(build_transform(task, train=True))
    rows.set_epoch(0)
    loader = DataLoader(rows, batch_size=15, num_workers=1, persistent_workers=True, collate_fn=collate_rows)
    first = torch.cat([batch["pixel_values"] for batch in loader])
    rows.set_epoch(1)
    assert not torch.equal(first, torch.cat([batch["pixel_values"] for batch in loader]))


def test_any_callable_is_a_transform(rows):
    import torch
    from torchvision.transforms import v2

    compose = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Resize(4)])
    assert collate_rows(rows.with_transform(compose).__getitems__([0, 1]))["pixel_values"].shape == (2, 1, 4, 4)
    ragged = rows.with_transform(lambda image: torch.zeros(1, 1 + int(np.asarray(image)[0, 0]) % 7))
    with pytest.raises(UserError, match="different sizes in one batch"):
        collate_rows(ragged.__getitems__(range(30)))


@pytest.mark.skipif(
    not os.environ.get("DAPPR_DATA_ROOT"), reason="set DAPPR_DATA_ROOT to a folder with the real datasets"
)
def test_real_long_tail():
    train, validation = (load_image_task("cifar10_lt_01", split) for split in ("train", "validation"))
    counts = train.class_counts() + validation.class_counts()
    assert counts.tolist() == tail_counts(counts[0], 10, 0.1) and counts[0] in (1000, 5000)
