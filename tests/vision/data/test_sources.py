"""Every dataset's layout on small files made here, on the Hub through a stub, and what is wrong with bad ones."""

import json
import os

import numpy as np
import pytest
import scipy.io
from pictures import class_folders, noise, png, save, write_idx

from dappr_llm.core.errors import UserError
from dappr_llm.vision.data.tasks import CORRUPTIONS, IMAGE_TASKS, SEVERITIES, get_image_task, load_image_task


def pixels(rows, i=0):
    """Untransformed pixels, channels last."""
    return rows[i]["pixel_values"].permute(1, 2, 0).numpy()


# Arrays


@pytest.mark.parametrize(
    "name, folder", [("mnist", "mnist"), ("kmnist", "KMNIST/raw"), ("fashion_mnist", "fashion-mnist")]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_idx(tmp_path, name, folder, zipped):
    images, labels = noise(20, 28, 28), np.arange(20) % 10
    write_idx(tmp_path / folder, "train", images, labels, zipped)
    write_idx(tmp_path / folder, "t10k", images[:6, ::-1], labels[:6], zipped)
    train, validation = (load_image_task(name, split, tmp_path) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (16, 4)
    assert sorted(train.ids + validation.ids) == sorted(f"train-{i}" for i in range(20))
    for i, name_ in enumerate(train.ids):
        assert (pixels(train, i)[..., 0] == images[int(name_.split("-")[1])]).all()
    test = load_image_task(name, "test", tmp_path)
    assert test.labels.tolist() == [0, 1, 2, 3, 4, 5] and test.ids[0] == "test-0" and test.num_classes == 10
    assert (pixels(test, 5)[..., 0] == images[5, ::-1]).all()


def test_cifar_npz_keeps_the_official_row_numbers(tmp_path):
    (tmp_path / "cifar10").mkdir()
    images = noise(20, 32, 32, 3)
    np.savez(tmp_path / "cifar10" / "train_20.npz", images=images, labels=np.arange(20) % 10, index=np.arange(20) * 7)
    np.savez(tmp_path / "cifar10" / "test.npz", images=images[:2], labels=np.array([3, 8], np.uint8))
    train = load_image_task("cifar10", "train", tmp_path)
    assert len(train) == 19 and all(int(i.split("-")[1]) % 7 == 0 for i in train.ids)
    test = load_image_task("cifar10", "test", tmp_path)
    assert test.class_names[test.labels[0]] == "cat" and (pixels(test) == images[0]).all()


def test_cifar10_binary(tmp_path):
    images = noise(10, 3, 32, 32)
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rows = [bytes([i]) + images[i].tobytes() for i in range(10)]
    (folder / "data_batch_1.bin").write_bytes(b"".join(rows[:6]))
    (folder / "data_batch_2.bin").write_bytes(b"".join(rows[6:]))
    (folder / "test_batch.bin").write_bytes(rows[4])
    found = [
        load_image_task({"task": "cifar10", "validation_fraction": 0.2}, s, tmp_path) for s in ("train", "validation")
    ]
    assert sorted(np.concatenate([rows.labels for rows in found])) == list(range(10))
    test = load_image_task("cifar10", "test", tmp_path)
    assert test.labels.tolist() == [4] and (pixels(test) == images[4].transpose(1, 2, 0)).all()


def test_cifar100_binary_takes_the_fine_label(tmp_path):
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "test.bin").write_bytes(bytes([19, 99]) + noise(3072).tobytes())
    assert load_image_task("cifar100", "test", tmp_path).labels.tolist() == [99]


def test_pickles_are_refused(tmp_path):
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="data_batch_1: Python pickles are not read.*binary version"):
        load_image_task("cifar10", "train", tmp_path)


def test_svhn_matrix_calls_ten_zero(tmp_path):
    (tmp_path / "svhn").mkdir()
    images = noise(3, 32, 32, 3)
    matrices = {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9]], np.uint8)}
    scipy.io.savemat(tmp_path / "svhn" / "test_32x32.mat", matrices)
    rows = load_image_task("svhn", "test", tmp_path)
    assert rows.labels.tolist() == [0, 1, 9] and (pixels(rows, 2) == images[2]).all()


def test_cifar10_c_takes_one_severity(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images, labels = noise(15, 32, 32, 3), np.tile([3, 8, 8], 5)
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", labels)
    rows = load_image_task("cifar10_c/fog/3", "test", tmp_path)
    assert len(rows) == 3 and (pixels(rows, 1) == images[7]).all() and rows.labels.tolist() == [3, 8, 8]
    assert get_image_task("cifar10_c/fog/3").name == "cifar10_c_fog_3" and rows.ids[0] == "fog-3-0"
    with pytest.raises(UserError, match="no split 'test' of cifar10_c_snow_1"):
        load_image_task("cifar10_c/snow/1", "test", tmp_path)
    with pytest.raises(UserError, match="is 95 sets"):
        load_image_task("cifar10_c", "test", tmp_path)


def test_there_are_95_corrupted_sets():
    names = [get_image_task(f"cifar10_c/{kind}/{level}").name for kind in CORRUPTIONS for level in SEVERITIES]
    assert len(CORRUPTIONS) == 19 and len(set(names)) == 95
    for spec, words in (("cifar10_c/fogg/3", "'fog'"), ("cifar10_c/fog/6", "1 to 5"), ("cifar10_c/fog", "severity")):
        with pytest.raises(UserError, match=words):
            get_image_task(spec)


# Files


def test_tinyimagenet_validates_on_the_last_files_of_each_class(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for name in ("n02", "n01"):
        for i in range(20):
            save(folder / "train" / name / "images" / f"{name}_{i:02}.JPEG")
    save(folder / "val" / "images" / "val_0.JPEG")
    save(folder / "val" / "images" / "val_1.JPEG")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    spec = {"task": "tinyimagenet", "num_classes": 2}
    train, validation, test = (load_image_task(spec, s, tmp_path, seed=5) for s in ("train", "validation", "test"))
    assert len(train) == 38 and train.class_names == ["n01", "n02"]
    assert validation.ids == ["train/n01/images/n01_19.JPEG", "train/n02/images/n02_19.JPEG"]
    assert test.labels.tolist() == [1, 0] and test.ids == ["val/val_0.JPEG", "val/val_1.JPEG"]
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn07\n")
    with pytest.raises(UserError, match="val_0.JPEG has the class 'n07'"):
        load_image_task(spec, "test", tmp_path)


def test_cub(tmp_path):
    folder = tmp_path / "CUB_200_2011"
    names = [f"00{c}.Bird_{c}/{i}.jpg" for c in (1, 2) for i in range(11)]
    for name in names:
        save(folder / "images" / name)
    lines = list(enumerate(names, start=1))
    (folder / "images.txt").write_text("\n".join(f"{i} {name}" for i, name in lines))
    (folder / "image_class_labels.txt").write_text("\n".join(f"{i} {int(name[2])}" for i, name in lines))
    (folder / "train_test_split.txt").write_text(
        "\n".join(f"{i} {int(not name.endswith('/0.jpg'))}" for i, name in lines)
    )
    (folder / "classes.txt").write_text("1 001.Bird_1\n2 002.Bird_2\n")
    spec = {"task": "cub", "num_classes": 2}
    train, validation, test = (load_image_task(spec, s, tmp_path) for s in ("train", "validation", "test"))
    assert train.class_counts().tolist() == [9, 9] and validation.class_counts().tolist() == [1, 1]
    assert test.ids == ["001.Bird_1/0.jpg", "002.Bird_2/0.jpg"] and test.labels.tolist() == [0, 1]
    assert test.class_names == ["001.Bird_1", "002.Bird_2"]
    # Lists of one's own go before the official ones, and nothing is held out from them.
    for split, chosen in (("train", names[:3] + names[-3:]), ("val", names[4:5]), ("test", names[5:7])):
        (folder / f"{split}.json").write_text(json.dumps({name: int(name[2]) * 5 for name in chosen}))
    assert [len(load_image_task(spec, s, tmp_path)) for s in ("train", "validation", "test")] == [6, 1, 2]
    assert load_image_task(spec, "train", tmp_path).labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_dogs(tmp_path):
    folder = tmp_path / "dogs"
    names = [f"n0{c}-Dog/{i}.jpg" for c in range(2) for i in range(10)]
    for name in [*names, "n00-Dog/t.jpg"]:
        save(folder / "Images" / name)
    for split, chosen in (("train", names), ("test", ["n00-Dog/t.jpg"])):
        listed = np.array([[name] for name in chosen], dtype=object)
        labels = np.array([[int(name[2]) + 1] for name in chosen], np.uint8)
        scipy.io.savemat(folder / f"{split}_list.mat", {"file_list": listed, "labels": labels})
    spec = {"task": "dogs", "num_classes": 2}
    train, validation, test = (load_image_task(spec, s, tmp_path) for s in ("train", "validation", "test"))
    assert train.class_counts().tolist() == [9, 9] and validation.class_counts().tolist() == [1, 1]
    assert test.ids == ["n00-Dog/t.jpg"] and test.class_names == ["n00-Dog", "n01-Dog"]


def test_imagenet_is_tested_on_its_validation_images(tmp_path):
    for split in ("train", "val"):
        class_folders(tmp_path / "imagenet" / split, ["n01", "n02"], each=2)
    spec = {"task": "imagenet", "num_classes": 2}
    assert len(load_image_task(spec, "train", tmp_path)) == 4
    assert load_image_task(spec, "test", tmp_path).ids[0] == "val/n01/0.png"
    with pytest.raises(UserError, match="are what it is tested on"):
        load_image_task(spec, "validation", tmp_path)
    held = {**spec, "validation_fraction": 0.25}
    assert [len(load_image_task(held, s, tmp_path)) for s in ("train", "validation", "test")] == [3, 1, 4]


@pytest.mark.parametrize("name, folder", [("imagenet_o", "imagenet-o"), ("dtd", "dtd/images")])
def test_ood_sets_are_taken_whole(tmp_path, name, folder):
    class_folders(tmp_path / folder, ["a", "b", "c"])
    rows = load_image_task({"task": name, "num_classes": 3}, "test", tmp_path)
    assert len(rows) == 9 and rows.class_names == ["a", "b", "c"]


def test_a_divided_dtd_is_put_together_again(tmp_path):
    for split in ("train", "test"):
        class_folders(tmp_path / "dtd" / split, ["a", "b"], each=2)
    rows = load_image_task({"task": "dtd", "num_classes": 2}, "test", tmp_path)
    assert len(rows) == 8 and len(set(rows.ids)) == 8


def test_places365(tmp_path):
    for i in range(3):
        save(tmp_path / "places365" / "val_256" / f"Places365_val_{i}.jpg")
    (tmp_path / "places365" / "places365_val.txt").write_text(
        "".join(f"Places365_val_{i}.jpg {9 * i}\n" for i in range(3))
    )
    assert load_image_task("places365", "test", tmp_path).labels.tolist() == [0, 9, 18]
    (tmp_path / "places365" / "places365_val.txt").unlink()
    assert len(load_image_task("places365", "test", tmp_path, labelled=False)) == 3


# Parquet, `datasets`, Hub


def hub_dataset(task, rows=40, **more):
    import datasets

    classes = datasets.ClassLabel(names=[f"class {i}" for i in range(task.num_classes or 3)])
    shape = (task.size, task.size) if task.channels == 1 else (task.size, task.size, 3)
    columns = {
        task.image: [{"bytes": png(noise(*shape, seed=i)), "path": None} for i in range(rows)],
        task.label: [i % classes.num_classes for i in range(rows)],
        **more,
    }
    extra = {key: datasets.Value("int64" if isinstance(values[0], int) else "string") for key, values in more.items()}
    features = datasets.Features({task.image: datasets.Image(), task.label: classes, **extra})
    return datasets.Dataset.from_dict(columns, features=features)


ON_THE_HUB = {
    "mnist": ("ylecun/mnist", None, "train", "test"),
    "kmnist": ("tanganke/kmnist", None, "train", "test"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None, "train", "test"),
    "cifar10": ("uoft-cs/cifar10", None, "train", "test"),
    "cifar10_lt_001": ("uoft-cs/cifar10", None, "train", "test"),
    "cifar10_lt_01": ("uoft-cs/cifar10", None, "train", "test"),
    "cifar100": ("uoft-cs/cifar100", None, "train", "test"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits", "train", "test"),
    "tinyimagenet": ("zh-plus/tiny-imagenet", None, "train", "valid"),
    "cub": ("bentrevett/caltech-ucsd-birds-200-2011", None, "train", "test"),
    "dogs": ("Donghyun99/Stanford-Dogs", None, "train", "test"),
    "imagenet": ("ILSVRC/imagenet-1k", None, "train", "validation"),
    "imagenet_o": ("clip-benchmark/wds_imagenet-o", None, "test", "test"),
    "dtd": ("tanganke/dtd", None, "train+test", "train+test"),
    "places365": ("dpdl-benchmark/Places365-Validation", None, "train", "train"),
    "cifar10_c/fog/3": ("robro/cifar10-c-parquet", None, "train", "train"),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_the_hub_is_read_through_datasets(monkeypatch, name):
    import datasets

    task = get_image_task(name)
    path, config, train_split, test_split = ON_THE_HUB[name]
    more = {}
    if task.where:
        more = {"corruption_name": ["fog"] * 30 + ["snow"] * 10, "corruption_level": [3] * 10 + [4] * 30}
    calls = []

    def fake(*args, **kwargs):
        calls.append((*args, *kwargs.values()))
        return hub_dataset(task, **more)

    monkeypatch.delenv("DAPPR_DATA_ROOT", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    train, test = (load_image_task(name, split) for split in ("train", "test"))
    assert calls == [(path, config, train_split, None), (path, config, test_split, None)]
    assert len(test) == (10 if task.where else 40) and test.labels.tolist() == [
        i % (task.num_classes or 3) for i in range(len(test))
    ]
    shape = (task.size, task.size, task.channels)
    assert (pixels(test, 7) == noise(*shape[: 2 + (task.channels > 1)], seed=7).reshape(shape)).all()
    kept = int(len(test) * (1 - (task.validation_fraction or 0) * (not task.whole)) + 1e-6)
    if not task.imbalance:
        assert len(train) == (40 if task.validation_rule == "last" else kept)  # one row per class: none to spare
    assert len(train.class_names) == train.num_classes


def test_every_benchmark_is_tested_here():
    bundled = {name for name, task in IMAGE_TASKS.items() if task.path is None}
    assert set(IMAGE_TASKS) - bundled == {name.split("/")[0] for name in ON_THE_HUB}


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.delenv("DAPPR_DATA_ROOT", raising=False)
    with pytest.raises(UserError, match="ylecun/mnist, train.*Couldn't reach the Hub.*--data-root"):
        load_image_task("mnist", "train")


@pytest.fixture
def dataset_cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_local_parquet_in_the_hubs_layout(tmp_path, dataset_cache):
    folder = tmp_path / "data" / "cifar10" / "plain_text"
    folder.mkdir(parents=True)
    dataset = hub_dataset(get_image_task("cifar10"))
    dataset.select(range(20)).to_parquet(folder.parent / "train-00000-of-00002.parquet")
    dataset.select(range(20, 40)).to_parquet(folder.parent / "train-00001-of-00002.parquet")
    train, validation = (load_image_task("cifar10", s, tmp_path / "data") for s in ("train", "validation"))
    assert (len(train), len(validation)) == (38, 2)
    i = train.ids.index("train-33") if "train-33" in train.ids else train.ids.index("train-34")
    assert (pixels(train, i) == noise(32, 32, 3, seed=int(train.ids[i].split("-")[1]))).all()


def test_parquet_with_names_for_labels(tmp_path, dataset_cache):
    import datasets

    def write(name, labels):
        values = {"photo": [png(noise(9, 9, 3)) for _ in labels], "kind": labels}
        datasets.Dataset.from_dict(values).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    splits = {"train": write("a.parquet", ["dog", "cat", "emu"]), "test": write("b.parquet", ["emu", "dog"])}
    spec = {"name": "mine", "splits": splits, "image": "photo", "label": "kind", "validation_fraction": None}
    assert load_image_task(spec, "train").labels.tolist() == [1, 0, 2]
    test = load_image_task(spec, "test")
    assert (
        test.labels.tolist() == [2, 1]
        and test.class_names == ["cat", "dog", "emu"]
        and pixels(test).shape == (9, 9, 3)
    )
    splits["test"] = write("c.parquet", ["emu", "dgo"])
    with pytest.raises(UserError, match="c.parquet, row 1: unknown class 'dgo'; did you mean 'dog'"):
        load_image_task(spec, "test")


def test_saved_datasets(tmp_path):
    import datasets

    task = get_image_task("mnist")
    datasets.DatasetDict(train=hub_dataset(task), test=hub_dataset(task, 4)).save_to_disk(tmp_path / "mnist")
    assert [len(load_image_task("mnist", s, tmp_path)) for s in ("train", "validation", "test")] == [32, 8, 4]


# What is wrong with files


def test_bad_arrays(tmp_path):
    folder = tmp_path / "mnist"
    images, labels = noise(4, 28, 28), np.arange(4)

    def complaint():
        with pytest.raises(UserError) as caught:
            load_image_task("mnist", "test", tmp_path)
        return str(caught.value)

    folder.mkdir()
    assert "no split 'test' of mnist" in complaint()
    write_idx(folder, "t10k", images, labels[:3])
    assert "4 images but 3 labels" in complaint()
    write_idx(folder, "t10k", images, np.array([0, 1, 17, 2]))
    assert "t10k-images" in complaint() and "row 2: label 17 among 10 classes" in complaint()
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:40])
    assert "gzip file is damaged" in complaint()
    path.unlink()
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"\0\0\0\x04" + b"\0\0\0\x1c" * 2 + b"12")
    assert "2 bytes of data where the header announces 3136" in complaint()
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"<html>404</html>")
    assert "not an IDX file of images" in complaint()
    (folder / "t10k-images-idx3-ubyte").unlink()
    (folder / "test.npz").write_bytes(b"PK nothing")
    assert "test.npz: not a readable NumPy file" in complaint()
    np.savez(folder / "test.npz", images=images.astype(float), labels=labels)
    assert "must be uint8" in complaint()
    np.savez(folder / "test.npz", images=images, labels=labels + 0.5)
    assert "labels must be integers" in complaint()
    np.savez(folder / "test.npz", images=np.array([{}], dtype=object), labels=labels)
    assert "plain arrays" in complaint()
    np.savez(folder / "test.npz", pictures=images)
    assert "no array `images`; it has pictures" in complaint()
    np.savez(folder / "test.npz", images=images)
    assert "row 0: the image has no label" in complaint()
    np.savez(folder / "test.npz", images=images[:0], labels=labels[:0])
    assert "has no images" in complaint()


def test_bad_lists(tmp_path):
    folder = tmp_path / "cub"
    save(folder / "images" / "a.jpg")
    (folder / "images.txt").write_text("1 a.jpg\n2\n")
    (folder / "image_class_labels.txt").write_text("1 1\n")
    (folder / "train_test_split.txt").write_text("1 1\n")
    with pytest.raises(UserError, match="images.txt, line 2: expected two words"):
        load_image_task("cub", "train", tmp_path)
    (folder / "images.txt").write_text("1 b.jpg\n")
    with pytest.raises(UserError, match="images.txt: names b.jpg, which is not under"):
        load_image_task("cub", "train", tmp_path)
    (folder / "images.txt").write_text("7 a.jpg\n")
    with pytest.raises(UserError, match="train_test_split.txt: no entry for '7'"):
        load_image_task("cub", "train", tmp_path)
    (folder / "train.json").write_text("[1]")
    with pytest.raises(UserError, match="train.json: expected a JSON object"):
        load_image_task("cub", "train", tmp_path)


real_data = pytest.mark.skipif(
    not os.environ.get("DAPPR_DATA_ROOT"), reason="set DAPPR_DATA_ROOT to a folder with the real datasets"
)


@real_data
@pytest.mark.parametrize(
    "name, counts, mean",
    [
        ("mnist", {"train": 48000, "validation": 12000, "test": 10000}, 0.1325),
        ("fashion_mnist", {"train": 48000, "validation": 12000, "test": 10000}, 0.2868),
        ("kmnist", {"test": 10000}, 0.1846),
        ("cifar10", {"test": 10000}, 0.4766),
    ],
)
def test_real_arrays(name, counts, mean):
    rows = {split: load_image_task(name, split) for split in counts}
    assert {split: len(found) for split, found in rows.items()} == counts
    assert rows["test"].images.pixels.mean() / 255 == pytest.approx(mean, abs=5e-4)
    assert rows["test"].class_counts().sum() == 10000 and min(rows["test"].class_counts()) > 800
