"""The demo set, augmenting and loading, settling: what becomes of images on their way to the network.

Run: python -m pytest tests/test_loading.py
"""
import gc
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import albumentations as A
import numpy as np
import PIL.Image
import pytest
import tifffile
import torch
import yaml

import train_unet
from conftest import TINY, draw_set
from helpers import CPU, as_float, as_png, block, coded_set, dataset, deep_colours, inspect, lives, save, two_kinds
from train_unet import ConfigError, DataError, Hardware, WindowSampler


def samples(data, config, workers, epoch=0):
    """All samples of one epoch through a loader, as {index: (image, mask)}."""
    sampler = WindowSampler(len(data), config)
    sampler.epoch = epoch
    config = {**config, 'num_workers': workers}
    loader = train_unet.build_loader(data, config, CPU, batch_sampler=sampler)
    return {int(i): (image, mask) for batch in loader
            for i, image, mask in zip(batch['index'], batch['image'], batch['mask'])}


def differing(first, second):
    """How many images are not the same."""
    return sum(not torch.equal(first[i][0], second[i][0]) for i in first)


# --- the demo set ---------------------------------------------------------------------


def test_no_threshold_solves_the_demo():
    """The best threshold on a colour, chosen with the truth at hand, stays below an IoU of 0.6."""
    counts = np.zeros((2, 3, 256))
    for number in range(240, 300, 3):                                  # a third of the validation images
        image, mask = train_unet.draw_demo(number)
        for truth in (0, 1):
            for colour in range(3):
                pixels = image[..., colour][(mask > 0) == truth]
                counts[truth, colour] += np.bincount(pixels, minlength=256)
    for direction in (1, -1):
        outside, inside = counts[..., ::direction].cumsum(-1)
        iou = inside / (counts[1].sum(-1, keepdims=True) + outside)
        assert 0.05 < iou.max() < 0.6


def test_demo_is_drawn_once_and_understood(tmp_path):
    folder = train_unet.write_demo(tmp_path / 'demo', 0, num_train=4, num_val=2)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob('*.png')}
    train_unet.write_demo(tmp_path / 'demo', 0, num_train=4, num_val=2)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob('*.png')}
    _, data = inspect(folder)
    assert [len(data.pairs.rows(s)) for s in train_unet.SPLITS] == [4, 2, 0]
    assert data.coding.num_classes == 2


def test_the_demo_is_drawn_again_when_its_files_are_gone(tmp_path):
    folder = train_unet.write_demo(tmp_path / 'demo', num_train=2, num_val=1)
    shutil.rmtree(folder)
    assert len(list(train_unet.write_demo(folder, num_train=2, num_val=1).glob('*/*/*.png'))) == 6


def test_a_demo_whose_second_drawing_was_interrupted_is_drawn_to_its_end(tmp_path, monkeypatch):
    """The mark of the first was still there: a part of the set was trained on, without a word."""
    folder, real, calls = train_unet.write_demo(tmp_path / 'demo', num_train=2, num_val=1), train_unet.draw_demo, []

    def draw(number):
        calls.append(number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(number)

    shutil.rmtree(folder)
    monkeypatch.setattr(train_unet, 'draw_demo', draw)
    with pytest.raises(KeyboardInterrupt):
        train_unet.write_demo(folder, num_train=2, num_val=1)
    assert len([*train_unet.write_demo(folder, num_train=2, num_val=1).glob('*/*/*.png')]) == 6


def test_no_picture_of_the_demo_is_seen_before_it_is_whole(tmp_path, monkeypatch):
    """Another run, begun at the same moment, may look."""
    def cut_off(image, path, *rest):
        Path(path).write_bytes(b'half')
        raise KeyboardInterrupt

    monkeypatch.setattr(PIL.Image.Image, 'save', cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_unet.write_demo(tmp_path / 'demo', num_train=2, num_val=1)
    assert not [*(tmp_path / 'demo').glob('*/*/[!.]*')]


# --- augmentation ---------------------------------------------------------------------


MANY_EPOCHS = {'num_epochs': 100}  # a run in which the default changes every other image


@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_augmentation_is_the_same_for_any_number_of_workers(small_set, augment):
    data, config = dataset(small_set, augment=augment, **MANY_EPOCHS)
    alone, helped = samples(data, config, 0), samples(data, config, 2)
    assert differing(alone, helped) == 0
    assert all(torch.equal(alone[i][1], helped[i][1]) for i in alone)


def test_augmentation_differs_between_epochs(small_set):
    data, config = dataset(small_set, **MANY_EPOCHS)
    assert differing(samples(data, config, 0, 0), samples(data, config, 0, 1)) >= len(data) - 2


def test_augmentation_differs_between_seeds(small_set):
    data, config = dataset(small_set, **MANY_EPOCHS)
    first = samples(data, config, 0)
    data.config = config = {**config, 'seed': 1}
    assert differing(first, samples(data, config, 0)) >= len(data) - 2


def test_augmentation_differs_between_images(tmp_path):
    """Equal images are not all augmented alike."""
    folder, place = coded_set(tmp_path / 'set', [0, 1], count=12)
    for path in (folder / 'images').iterdir():
        save(path, np.random.default_rng(0).integers(0, 255, (*place.shape, 3)))
    data, config = dataset(folder, **MANY_EPOCHS)
    assert len({image.numpy().tobytes() for image, _ in samples(data, config, 0).values()}) >= 7


def test_transforms_are_drawn_independently(small_set):
    """Three coins leave one image in eight as it is; with one coin for all it would be half."""
    data, config = dataset(small_set, **MANY_EPOCHS)
    same = []
    for index in range(len(data)):
        plain = torch.from_numpy(data.read_resized(index)[0]).permute(2, 0, 1)
        mirrored = plain.flip(2)
        for epoch in range(20):
            image = data[(epoch, index)]['image']
            same.append([torch.equal(image, plain), torch.equal(image, mirrored)])
    assert np.mean(same, axis=0) == pytest.approx([1 / 8, 1 / 8], abs=0.07)


@pytest.mark.parametrize('augment, epochs, chances', [
    ('default', 12, [0.5, 0.0, 0.0]), ('default', 25, [0.5, 0.0, 0.0]), ('default', 32, [0.5, 0.1, 0.1]),
    ('default', 60, [0.5, 0.5, 0.5]), ('default', 200, [0.5, 0.5, 0.5])])
def test_augmentation_grows_with_the_run(augment, epochs, chances):
    """Mirror images always, other changes the more often the more often an image is seen."""
    config = {**train_unet.CONFIG, 'augment': augment, 'num_epochs': epochs, 'image_size': [32, 32],
              'image_dtype': 'uint8'}
    steps = train_unet.build_augmentation(config).transforms
    assert [step.p for step in steps] == chances


@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_images_are_not_mirrored_if_told_so(augment):
    config = {**train_unet.CONFIG, 'augment': augment, 'num_epochs': 60, 'image_size': [32, 32], 'image_dtype': 'uint8'}
    turned = [{type(step).__name__ for step in train_unet.build_augmentation(config | {'mirror': mirror}).transforms}
              & {'HorizontalFlip', 'VerticalFlip', 'D4'} for mirror in (True, False)]
    strong = augment == 'strong'
    assert turned == ([{'HorizontalFlip', 'D4'}, {'VerticalFlip'}] if strong else [{'HorizontalFlip'}, set()])


@pytest.mark.parametrize('channels, dtype', [(1, np.uint8), (2, np.float32), (5, np.uint8),
                                             (13, np.float32)])
@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_augmentation_of_any_bands(tmp_path, channels, dtype, augment):
    """Grey, two-band and multi-band images go through, and keep shape and type."""
    folder, place = coded_set(tmp_path / 'set', [0, 1], count=6)
    for path in list((folder / 'images').iterdir()):
        array = np.random.default_rng(0).integers(0, 255, (*place.shape, channels)).astype(dtype)
        save(path.with_suffix('.npy'), array)
        path.unlink()
    data, config = dataset(folder, augment=augment, in_channels=channels, **MANY_EPOCHS)
    for epoch in range(3):
        for image, _ in samples(data, config, 0, epoch).values():
            assert image.shape == (channels, 32, 32)
            assert image.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)


@pytest.mark.parametrize('policy', ['resize', 'crop', 'pad'])
@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_masks_hold_only_original_ids(tmp_path, augment, policy):
    """No class is made up between two others; what comes in from outside is ignored."""
    folder, _ = coded_set(tmp_path / 'set', [0, 5, 9], kind='P', count=8)
    data, config = dataset(folder, augment=augment, size_policy=policy, **MANY_EPOCHS)
    seen = set()
    for epoch in range(4):
        for _, mask in samples(data, config, 0, epoch).values():
            assert mask.shape == (32, 32)
            seen |= set(mask.unique().tolist())
    assert seen == {0, 5, 9, 255}


@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_fill_is_ignored(tmp_path, augment):
    """Bright images stay bright wherever the mask counts; black fill is 255 in the mask."""
    folder, _ = coded_set(tmp_path / 'set', [0] * 9 + [1], count=12)
    for path in (folder / 'images').iterdir():
        save(path, np.full((20, 16, 3), 200))
    data, config = dataset(folder, augment=augment, image_dtype='float32', **MANY_EPOCHS)  # no change of colour
    filled = 0
    for epoch in range(3):
        for image, mask in samples(data, config, 0, epoch).values():
            black = (image == 0).all(0)
            filled += int(black.sum())
            assert (mask[black] == 255).all()
    assert filled > 0


@pytest.mark.parametrize('policy', ['crop', 'pad'])
def test_padding_is_ignored(tmp_path, policy):
    """Images smaller than image_size fill it up with pixels that do not count."""
    folder, place = coded_set(tmp_path / 'set', [0, 1], count=4)
    data, config = dataset(folder, augment='none', size_policy=policy)
    for _, mask in samples(data, config, 0).values():
        assert (mask == 255).sum() == 32 * 32 - place[:, :32].size


def test_an_augmentation_file_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'my.json').write_text('{}')
    config, _, _ = train_unet.resolve_config(None, {'augment': '~/my.json'})
    assert config['augment'] == str(tmp_path / 'my.json')


def test_validation_is_not_augmented(small_set):
    data, config = dataset(small_set, 'val', augment='strong')
    image, mask = data.read(0)
    assert torch.equal(data[(0, 0)]['image'], data[(1, 0)]['image'])
    assert torch.equal(data[(0, 0)]['full_mask'], torch.from_numpy(mask))
    assert (data[0]['image'].permute(1, 2, 0).numpy() == train_unet.resize(image, 32, 32)).all()


# --- pipelines from a file ------------------------------------------------------------


def built(path, content):
    """The pipeline of a file with this content."""
    path.write_text(content)
    return train_unet.build_augmentation({**train_unet.CONFIG, 'augment': str(path), 'image_size': [32, 32],
                                          'image_dtype': 'uint8'})


def test_a_saved_pipeline_is_the_one_that_runs(tmp_path):
    flips = [A.HorizontalFlip(p=1.0), A.VerticalFlip(p=1.0)]
    one_of = built(tmp_path / 'a.json', json.dumps(A.to_dict(A.OneOf(flips, p=1.0))))
    rare = built(tmp_path / 'b.json', json.dumps(A.to_dict(A.Compose(flips[:1], p=0.1))))
    image = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    mask = np.zeros((32, 32), np.uint8)
    changed = [not np.array_equal(rare(image=image, mask=mask)['image'], image) for _ in range(100)]
    assert 0 < sum(changed) < 50
    for _ in range(10):                                                # one of them, never both
        made = one_of(image=image, mask=mask)['image']
        assert np.array_equal(made, image[::-1]) or np.array_equal(made, image[:, ::-1])


@pytest.mark.parametrize('pipeline, dump', [
    (A.ReplayCompose([A.HorizontalFlip(p=1.0)]), json.dumps), (A.HorizontalFlip(p=1.0), json.dumps),
    (A.Compose([A.Affine(rotate=(180, 180), p=1.0), A.VerticalFlip(p=1.0)]), yaml.dump)],
    ids=['ReplayCompose', 'one transform', 'yaml.dump'])
def test_pipelines_are_read_however_they_were_saved(tmp_path, pipeline, dump):
    """Each is a mirror; yaml.dump writes tuples in a way of Python's own."""
    path = tmp_path / ('a.json' if dump is json.dumps else 'a.yaml')
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    made = built(path, dump(A.to_dict(pipeline)))(image=image, mask=image[..., 0])
    assert np.array_equal(made['image'], image[:, ::-1]) and np.array_equal(made['mask'], image[:, ::-1, 0])


def saved(path, *steps):
    """A pipeline in a file, as A.to_dict gives it."""
    content = A.to_dict(A.Compose(list(steps)))
    path.write_text(json.dumps(content) if path.suffix == '.json' else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize('suffix', ['.json', '.yaml', '.yml'])
def test_what_the_network_does_itself_is_left_out_of_a_saved_pipeline(small_set, tmp_path, caplog, suffix):
    """With Normalize and ToTensorV2 the sample is still what the network takes: bytes, channels first."""
    caplog.set_level(logging.INFO, 'train_unet')
    wish = saved(tmp_path / f'a{suffix}', A.HorizontalFlip(p=1.0), A.Normalize(), A.ToTensorV2())
    data, config = dataset(small_set, augment=wish)
    sample = data[(0, 0)]
    assert sample['image'].dtype == torch.uint8 and sample['image'].shape == (3, 32, 32)
    image, mask = data.read_resized(0)
    assert torch.equal(sample['image'].permute(1, 2, 0).flip(1), torch.from_numpy(image))
    assert torch.equal(sample['mask'].flip(1), torch.from_numpy(mask))
    assert [type(step).__name__ for step in data.augmentation.transforms] == ['HorizontalFlip']
    assert 'Normalize, ToTensorV2 left out' in caplog.text


@pytest.mark.parametrize('group', [A.Compose, A.Sequential])
def test_it_is_left_out_of_pipelines_inside_one_too(small_set, tmp_path, group):
    """Else float images would be normalised twice, without a word."""
    ends = group([A.Normalize(), A.VerticalFlip(p=1.0)], p=1.0)
    data, config = dataset(small_set, image_dtype='float32', augment=saved(tmp_path / 'a.json', ends))
    sample, (image, _) = data[(0, 0)]['image'], data.read_resized(0)
    assert torch.equal(sample.permute(1, 2, 0).flip(0), torch.from_numpy(image))


def test_the_chance_of_a_pipeline_holds_for_crops_too(small_set, tmp_path):
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(A.Compose([A.InvertImg(p=1)], p=0.0))))
    data, _ = dataset(small_set, augment=str(tmp_path / 'p.json'), size_policy='crop')
    assert max(data[(0, i)]['image'].float().mean() for i in range(len(data))) < 127


TURNS = [A.Affine(rotate=(40, 50), p=1.0), A.Rotate((40, 50), p=1.0)]


@pytest.mark.parametrize('step', [*TURNS, A.OneOf(TURNS, p=1.0)], ids=['Affine', 'Rotate', 'inside OneOf'])
def test_fill_of_a_saved_pipeline_is_ignored(small_set, tmp_path, step):
    """The saved fill_mask is 0, which is the background; what turns in from outside is none."""
    inner = getattr(step, 'transforms', [step])
    assert {transform.fill_mask for transform in inner} == {0}
    data, _ = dataset(small_set, augment=saved(tmp_path / 'a.json', step))
    for epoch in range(3):
        mask = data[(epoch, 0)]['mask']
        assert (mask[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
        assert set(mask.unique().tolist()) == {0, 1, 255}


def test_holes_of_a_saved_pipeline_leave_the_mask_as_it_was_saved(small_set, tmp_path):
    """They became ignored: a third of all pixels, without a word."""
    for fill_mask, expected in ((None, {0, 1}), (0, {0, 1}), (255, {0, 1, 255})):
        step = A.CoarseDropout(num_holes_range=(9, 9), fill_mask=fill_mask, p=1.0)
        data, _ = dataset(small_set, augment=saved(tmp_path / 'a.json', step))
        assert {*torch.cat([data[(0, row)]['mask'] for row in range(len(data))]).unique().tolist()} == expected


def test_the_mask_is_never_interpolated(small_set, tmp_path):
    wish = saved(tmp_path / 'a.json', A.Affine(rotate=(20, 30), mask_interpolation=1, p=1.0))
    data, _ = dataset(small_set, augment=wish)
    assert set(data[(0, 0)]['mask'].unique().tolist()) <= {0, 1, 255}


def test_no_pipeline_interpolates_the_mask(tmp_path):
    step = A.RandomResizedCrop((32, 32), scale=(0.5, 0.9), area_for_downscale='image_mask', p=1)
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(A.Compose([step]))))
    pipeline = train_unet.load_augmentation(str(tmp_path / 'p.json'), (96, 96, 3), 'uint8')
    mask = np.where(np.random.default_rng(0).random((96, 96)) > 0.5, 255, 0).astype(np.uint8)
    for _ in range(8):
        assert set(np.unique(pipeline(image=np.zeros((96, 96, 3), np.uint8), mask=mask)['mask'])) <= {0, 255}


@pytest.mark.parametrize('step', [A.Resize(45, 45), A.CropAndPad(px=-6, p=1.0)], ids=['shrinks', 'grows again'])
def test_a_pipeline_that_resizes_leaves_masks_where_their_images_are(tmp_path, step):
    """OpenCV's nearest pixel is the one to the upper left: masks lay half a pixel beside what they show."""
    pipeline = train_unet.load_augmentation(saved(tmp_path / 'a.json', step), (64, 64, 3), 'uint8')
    shifts, (y, x) = [], np.mgrid[:64, :64]
    for seed in range(20):
        cy, cx, radius = np.random.default_rng(seed).uniform((20, 20, 8), (40, 40, 14))
        disc = ((y - cy) ** 2 + (x - cx) ** 2 < radius ** 2).astype(np.uint8)
        made = pipeline(image=np.dstack([255 * disc] * 3), mask=disc)
        weights = made['image'][..., 0].astype(float), made['mask'].astype(float)
        places = [[(weight * at).sum() / weight.sum() for at in np.indices(made['mask'].shape)]
                  for weight in weights]
        shifts.append(np.subtract(*places))
    assert np.abs(np.mean(shifts, 0)).max() < 0.1                      # it was half a pixel


@pytest.mark.parametrize('level', [900.0, -20.0])                      # -20: radar in dB
def test_float_images_are_not_cut_off_by_a_pipeline(tmp_path, level):
    for n in range(6):
        save(tmp_path / f'set/images/{n}.npy', np.full((32, 32, 1), level + n, np.float32))
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.mgrid[:32, :32][0] > 16))
    steps = A.Compose([A.RandomBrightnessContrast(p=0.01)])
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(steps)))
    data, _ = dataset(tmp_path / 'set', augment=str(tmp_path / 'p.json'), in_channels=1)
    with pytest.raises(DataError, match='limit float images to 0..1'):
        data[(0, 0)]
    white = np.full((32, 32, 1), np.nextafter(np.float32(1), np.float32(2)))           # as cv2 makes it of 16 bits
    for change in (white, white * 0 - np.float32(0.002)):
        assert data.augmented(change, np.zeros((32, 32), np.uint8), 0, 0)[0].shape == (32, 32, 1)
    with pytest.raises(DataError, match='beyond 0 to 1'):
        data.augmented(white * 0 - np.float32(0.5), np.zeros((32, 32), np.uint8), 0, 0)


def test_a_step_that_inverts_hides_none_that_cuts_off(tmp_path):
    step = A.OneOf([A.InvertImg(p=1.0), A.RandomBrightnessContrast(p=1.0)], p=1.0)
    assert train_unet.load_augmentation(saved(tmp_path / 'p.json', step), (32, 32, 1), 'float32').cuts_off


def test_a_pipeline_that_ends_at_another_size_is_told(tmp_path, caplog):
    """If it resizes, things are larger in training than in validation."""
    for size, is_told in ((32, 48), False), ((64, 96), True):
        config = {**train_unet.CONFIG, 'augment': saved(tmp_path / 'a.json', A.Resize(*size)), 'image_size': [32, 48],
                  'image_dtype': 'uint8'}
        train_unet.build_augmentation(config)
        assert ('image_size=64x96' in caplog.text) == is_told


@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
def test_the_way_to_floats_and_back_is_left_out(tmp_path, dtype):
    """As albumentations' page on 16 bits has it."""
    steps = A.ToFloat(max_value=65535.0), A.VerticalFlip(p=1.0), A.FromFloat(dtype='uint16', max_value=65535.0)
    config = {**train_unet.CONFIG, 'augment': saved(tmp_path / 'a.json', *steps), 'image_size': [32, 32],
              'image_dtype': dtype}
    assert [type(step).__name__ for step in train_unet.build_augmentation(config).transforms] == ['VerticalFlip']


@pytest.mark.parametrize('step, ignores', [
    (A.Affine(rotate=(40, 50), border_mode=0, p=1.0), True), (A.Affine(rotate=(40, 50), border_mode=4, p=1.0), False),
    (A.RandomCrop(32, 32, p=1.0), False)], ids=['constant', 'reflected', 'crop'])
def test_a_step_that_fills_nothing_ignores_nothing(small_set, tmp_path, step, ignores):
    """A loss that fails at 255 was refused, though it would meet none."""
    data, _ = dataset(small_set, augment=saved(tmp_path / 'a.json', step))
    assert data.ignores == ignores == (255 in data[(0, 0)]['mask'])


@pytest.mark.parametrize('step, channels', [
    (A.RandomSizedBBoxSafeCrop(32, 32, p=1.0), 3), (A.HueSaturationValue(p=1.0), 5), (A.ToGray(p=1.0), 5),
    (A.RandomCrop(64, 64, p=1.0), 3)], ids=['needs boxes', 'needs 3 channels', 'needs RGB', 'needs more pixels'])
def test_saved_pipeline_that_cannot_take_the_image_is_refused(tmp_path, step, channels):
    """Before training starts, not in its middle."""
    path = saved(tmp_path / 'a.json', step)
    config = {**train_unet.CONFIG, 'augment': path, 'image_size': [32, 32], 'in_channels': channels,
              'image_dtype': 'uint8'}
    with pytest.raises(ConfigError, match='that suits these images'):
        train_unet.build_augmentation(config)


@pytest.mark.parametrize('step, size', [(A.RandomScale(0.5, p=0.5), [32, 32]), (A.RandomRotate90(p=1.0), [32, 64]),
                                        (A.ToGray(num_output_channels=1, p=0.5), [32, 32])])
def test_a_pipeline_that_changes_the_size_is_refused(tmp_path, step, size):
    config = {**train_unet.CONFIG, 'augment': saved(tmp_path / 'a.json', step), 'image_size': size,
              'image_dtype': 'uint8'}
    with pytest.raises(ConfigError, match='that suits these images'):
        train_unet.build_augmentation(config)


# --- resizing -------------------------------------------------------------------------


@pytest.mark.parametrize('size, wanted', [((60, 20), (16, 64)), ((20, 60), (64, 16)), ((60, 64), (16, 16)),
                                          ((20, 20), (64, 64))])
def test_rows_of_a_large_image_are_resized_as_a_whole_image_is(size, wanted):
    """Also where one side shrinks and the other grows; halves are rounded either way."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    whole, rows = train_unet.resize(image, *wanted), train_unet.shrink_by_rows(image, *wanted, step=7)
    if wanted[0] <= size[0]:                                           # rows are never made more in bands
        assert np.abs(whole.astype(int) - rows).max() <= 1
    assert whole.shape == (*wanted, 3) and abs(whole.mean() - image.mean()) < 3


@pytest.mark.parametrize('policy', ['resize', 'crop'])
def test_deep_images_are_never_seen_as_black(tmp_path, policy):
    """image_dtype=uint8 typed for 16-bit images would have cut 0..1 down to 0."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=4)
    for n in range(4):
        save(folder / f'images/{n}.png', np.full((4, 16), 30000), 'I;16')
    data, _ = dataset(folder, image_dtype='uint8', size_policy=policy)
    for read in (data.read, data.__getitem__):
        with pytest.raises(DataError) as caught:
            read(0)
        assert data.name(0) in str(caught.value) and 'image_dtype=uint8' in str(caught.value)


# --- images kept in memory ------------------------------------------------------------


@pytest.mark.parametrize('workers', [0, 2])
def test_cached_images_are_those_on_disk(small_set, workers):
    """The cache in shared memory changes nothing, when it is filled and when it is read."""
    cached, config = dataset(small_set, cache_images=True)
    plain, _ = dataset(small_set, cache_images=False)
    for epoch in (0, 1):
        found = samples(cached, config, workers, epoch)
        assert differing(found, samples(plain, config, 0, epoch)) == 0
    assert cached.cache[2].all() and plain.cache is None


def test_validation_samples_are_read_once_if_images_are_cached(small_set, monkeypatch):
    settings = {'data': str(small_set), 'image_size': 32, 'cache_images': True}
    config, sources, _ = train_unet.resolve_config(None, settings)
    config, _, _, data, _ = train_unet.prepare(config, sources, torch.device('cpu'))
    kept, fresh = (train_unet.SegmentationDataset(data, 'val', {**config, 'cache_images': cached}, is_training=False)
                   for cached in (True, False))
    first = kept[0]
    monkeypatch.setattr(train_unet, 'read_image', lambda *_: pytest.fail('read again'))
    assert all(torch.equal(torch.as_tensor(kept[0][key]), torch.as_tensor(first[key])) for key in first)
    with pytest.raises(pytest.fail.Exception):
        fresh[0]


def test_what_a_worker_keeps_takes_no_shared_memory_and_no_open_file(small_set, monkeypatch):
    """Each validation mask that was sent stayed open in its worker: with a thousand of them, or 64 MiB, it died."""
    def look(data, key, read=train_unet.SegmentationDataset.__getitem__):
        sample = read(data, key)
        kept = [value for one in data.kept.values() for value in one.values() if torch.is_tensor(value)]
        assert kept
        return sample | {'index': sum(value.is_shared() for value in kept)}

    monkeypatch.setattr(train_unet.SegmentationDataset, '__getitem__', look)
    data, config = dataset(small_set, 'val', num_workers=1, cache_images=True)
    loader = train_unet.build_loader(data, config, CPU, batch_sampler=[[0], [1]])
    told = [batch['index'].tolist() for _ in range(2) for batch in loader]         # as read, and as kept
    train_unet.stop_workers(loader)
    assert told == [[0]] * 4


# --- windows --------------------------------------------------------------------------


SIZES = [(count, batch, passes) for count in (2, 3, 7, 8, 9, 17, 33, 64) for batch in (1, 2, 4, 8)
         for passes in (1, 3)]


def sampler_of(count, batch, passes, **ranks):
    config = {**train_unet.CONFIG, 'batch_size': batch, 'accumulation_steps': passes}
    return WindowSampler(count, config, **ranks)


def test_each_image_once_per_epoch():
    for count, batch, passes in SIZES:
        seen = [key for indices in sampler_of(count, batch, passes) for key in indices]
        assert sorted(seen) == [(0, i) for i in range(count)], (count, batch, passes)


def test_micro_batches_have_the_wanted_size():
    """At most batch_size images, one more only to spare a leftover of one, which never is alone."""
    for count, batch, passes in SIZES:
        lengths = [len(indices) for indices in sampler_of(count, batch, passes)]
        assert max(lengths) <= batch + (1 if batch > 1 and count % 2 else 0), (count, batch, passes)
        assert batch == 1 or min(lengths) >= 2, (count, batch, passes)


@pytest.mark.parametrize('count, windows', [(16, [8, 8]), (17, [8, 9]), (19, [8, 11]),
                                            (20, [8, 8, 4]), (7, [7]), (1, [1])])
def test_small_leftover_joins_the_window_before(count, windows):
    assert [len(window) for window in sampler_of(count, 8, 1).windows()] == windows


def test_order_differs_between_epochs_and_seeds():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        sampler = WindowSampler(50, {**train_unet.CONFIG, 'seed': seed})
        sampler.epoch = epoch
        orders.append([i for indices in sampler for _, i in indices])
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_epoch_goes_on_in_its_middle():
    """After a resume the remaining windows are those that an unbroken epoch would have had."""
    whole, rest = sampler_of(40, 4, 2), sampler_of(40, 4, 2)
    rest.first_window = 3
    assert list(rest) == list(whole)[6:]


def test_ranks_share_each_window():
    """Each takes its images of the same window: no image twice, and none left out."""
    for count, batch, passes in [sizes for sizes in SIZES if sizes[0] >= 7 and sizes[1] * sizes[2] >= 6]:
        for world in (2, 3):
            ranks = [sampler_of(count, batch, passes, rank=rank, world_size=world) for rank in range(world)]
            for number, window in enumerate(ranks[0].windows()):
                shares = [np.concatenate(rank.micro_batches(rank.windows()[number])) for rank in ranks]
                assert sorted(np.concatenate(shares)) == sorted(window), (count, batch, passes, world)


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_every_process_gets_as_many_pieces_of_a_window_and_no_image_is_lost(ranks):
    for batch_size in (1, 2, 3, 4, 8):
        config = {**train_unet.CONFIG, 'batch_size': batch_size}
        samplers = [train_unet.WindowSampler(100, config, rank, ranks) for rank in range(ranks)]
        for length in range(ranks, 50):
            pieces = [sampler.micro_batches(np.arange(length)) for sampler in samplers]
            assert len({len(own) for own in pieces}) == 1, (batch_size, length)
            lengths = Counter(len(piece) for own in pieces for piece in own)
            assert 0 not in lengths and max(lengths) <= batch_size + (ranks == 1 or batch_size == 1)
            assert ranks > 1 or 1 not in lengths or batch_size == 1 or length == 1
            assert sorted(np.concatenate([piece for own in pieces for piece in own])) == list(range(length))


def test_no_process_gets_more_images_at_once_than_the_memory_was_tried_with():
    """A leftover joins the last window: 11 images of two processes, who take four each in the window before."""
    for rank, last in ((0, [3, 3]), (1, [3, 2])):
        sampler = sampler_of(19, 8, 1, rank=rank, world_size=2)
        assert [[len(piece) for piece in sampler.micro_batches(window)] for window in sampler.windows()] == [[4], last]


# --- images with foreground -----------------------------------------------------------


@pytest.mark.parametrize('shown, share, wanted', [(3, 0.5, 10), (3, 0.25, 5), (1, 1.0, 20), (3, 0.0, 3), (10, 0.5, 10),
                                                  (15, 0.5, 15), (0, 0.5, 0), (20, 0.5, 20)])
def test_a_least_share_of_an_epoch_shows_foreground(shown, share, wanted):
    shows = np.arange(20) % 20 < shown
    sampler = WindowSampler(20, {**train_unet.CONFIG, 'oversample_foreground': share}, rarity=shows / 2)
    epochs = []
    for sampler.epoch in range(3):
        draws = [draw for keys in sampler for _, draw in keys]
        times = Counter(draw % 20 for draw in draws)
        counts = [[times[i] for i in np.flatnonzero(side)] for side in (shows, ~shows)]
        assert len({*draws}) == len(draws) == 20 and sum(counts[0]) == wanted
        assert not shown or max(counts[0]) - min(counts[0]) <= 1       # each as often, but for a remainder
        assert max(counts[1], default=1) == 1 or wanted == 20
        epochs.append(draws)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    if wanted == shown:
        assert sorted(epochs[0]) == list(range(20))


def sparse_set(folder, count=20, shown=3):
    """A set whose first images alone show a disc."""
    draw_set(folder, count)
    for n in range(shown, count):
        save(folder / f'masks/{n:03d}.png', np.zeros((40, 40)))
    return folder


@pytest.mark.parametrize('size_policy', ['resize', 'crop'])
def test_an_image_that_comes_again_in_an_epoch_is_changed_otherwise(tmp_path, size_policy):
    data, config = dataset(sparse_set(tmp_path / 'set'), val_fraction=0.0, augment='strong', image_size=32,
                           size_policy=size_policy)
    row = int(np.flatnonzero(data.rarity)[0])
    first, again, same = (data[0, row + n * len(data)] for n in (0, 1, 1))
    assert not torch.equal(first['image'], again['image']) and torch.equal(again['image'], same['image'])
    assert first['index'] == again['index'] == row and data.name(row + len(data)) == data.name(row)


@pytest.mark.parametrize('share, seen', [(0.5, 10), (0.0, 3)])
def test_training_sees_more_of_the_few_images_with_foreground(tmp_path, share, seen):
    data, config = dataset(sparse_set(tmp_path / 'set'), val_fraction=0.0, augment='none', batch_size=4,
                           oversample_foreground=share)
    loader, _ = train_unet.build_loaders(data, data, config, CPU)
    assert sum(bool(mask.any()) for batch in loader for mask in batch['mask']) == seen


def small_discs(folder):
    """Images of 200 x 160 pixels, of which a disc of 4 x 4 in each and the ignored frame are not class 0."""
    for n in range(10):
        mask = np.zeros((160, 200))
        mask[[0, -1]], mask[7 * n + 20:7 * n + 24, 30:34] = 255, 1
        save(folder / f'images/{n}.png', np.repeat(mask[..., None] == 1, 3, 2) * 200)
        save(folder / f'masks/{n}.png', mask)
    return folder


@pytest.mark.parametrize('share, again, least, most', [(0.9, 0, 0.27, 0.55), (0.9, 1, 1, 1), (0.0, 0, 0, 0.2)])
def test_crops_lie_around_foreground(tmp_path, share, again, least, most):
    """A third of them, and all of images that come again in an epoch: of large images hardly any showed some."""
    data, _ = dataset(small_discs(tmp_path / 'set'), val_fraction=0.0, augment='none', image_size=32, num_classes=2,
                      size_policy='crop', oversample_foreground=share, mask_values={0: 0, 1: 1})
    crops = [data[epoch, index + again * len(data)] for epoch in range(10) for index in range(len(data))]
    shows = [(crop['mask'] == 1).any().item() for crop in crops]
    assert least <= np.mean(shows) <= most
    assert all(torch.equal(crop['image'][0] > 0, crop['mask'] == 1) for crop in crops)
    places = {tuple(np.argwhere(crop['mask'].numpy() == 1)[0]) for crop in itertools.compress(crops, shows)}
    assert len(places) >= 0.7 * sum(shows)                             # not always in the middle


def test_a_crop_around_foreground_lies_anywhere_with_it_inside():
    rng, mask = np.random.default_rng(0), np.zeros((50, 70), np.uint8)
    mask[3, 66], mask[:, 0] = 1, train_unet.IGNORE
    seen = set()
    for _ in range(300):
        image, part = train_unet.around_foreground(np.arange(3500).reshape(50, 70), mask, 8, 20, rng)
        assert part.shape == image.shape == (8, 20) and part.any()
        seen.add(int(image[0, 0]))
    assert seen == {70 * top + left for top in range(4) for left in range(47, 51)}
    _, tall = train_unet.around_foreground(mask, mask, 60, 20, rng)    # what lacks is filled afterwards
    assert tall.shape == (50, 20) and tall.any()
    empty = np.where(mask == 1, 0, mask)
    assert train_unet.around_foreground(empty, empty, 8, 20, rng)[1] is empty


def test_crops_lie_around_rare_classes_as_often_as_around_common_ones():
    """Of a class of 3,600 pixels and a far one of 16 crops showed the second less often than without any aim."""
    rng, mask = np.random.default_rng(0), np.zeros((160, 200), np.uint8)
    mask[10:70, 10:70], mask[100:104, 150:190:13] = 1, 2
    crops = [train_unet.around_foreground(mask, mask, 32, 32, rng)[1] for _ in range(200)]
    assert 0.4 < np.mean([(crop == 2).any() for crop in crops]) < 0.6
    turned = np.asfortranarray(mask)                                   # of a .mat
    assert train_unet.around_foreground(turned, turned, 32, 32, rng)[1].any()


def test_crops_lie_around_all_of_the_foreground():
    rng, mask = np.random.default_rng(0), np.zeros((60, 300), np.uint8)
    mask[5:25], mask[50, 150] = 1, 1
    crops = [train_unet.around_foreground(np.tile(np.arange(300), (60, 1)), mask, 4, 4, rng) for _ in range(300)]
    left = [int(image[0, 0]) for image, _ in crops]
    assert min(left) < 30 and max(left) > 260                          # not the first of a row alone
    assert np.mean([(part.sum() == 1) for _, part in crops]) < 0.03    # a row counts by its pixels


def two_classes(folder, often=8, seldom=2, count=40):
    """A set whose first images show class 1, the next few class 2, the last of these both, and the others nothing."""
    draw_set(folder, count)
    for n in range(count):
        mask = np.zeros((40, 40))
        mask[5:10, 5:10], mask[20:25, 20:25] = n < often or n == often + seldom - 1, 2 * (often <= n < often + seldom)
        save(folder / f'masks/{n:03d}.png', mask)
    return folder


def test_images_of_rare_classes_come_more_often(tmp_path):
    data, config = dataset(two_classes(tmp_path / 'set', often=9, seldom=4, count=40), val_fraction=0.0)
    assert data.rarity.tolist() == [1] * 9 + [2.5] * 4 + [0] * 27      # 10 show class 1, 4 class 2
    sampler, times = WindowSampler(40, config, rarity=data.rarity), Counter()
    for sampler.epoch in range(50):
        draws = [draw for keys in sampler for _, draw in keys]
        assert len({*draws}) == len(draws) == 40                       # again with 40 added, once more with 80, ...
        assert {draw % 40 for draw in draws if draw >= 40} <= {draw for draw in draws if draw < 40}
        times.update(draw % 40 for draw in draws)
    of_each = [sum(times[n] for n in rows) / 50 for rows in (range(9), range(9, 13))]      # of the 36 in an epoch
    assert of_each == pytest.approx([9 + 23 * 9 / 19, 4 + 23 * 10 / 19], abs=0.2)


@pytest.mark.parametrize('count', [2, 3, 4, 10])
def test_of_few_images_those_without_foreground_come_too(count):
    """Of up to four none did."""
    sampler, seen = WindowSampler(count, train_unet.CONFIG | {'batch_size': 2, 'accumulation_steps': 1},
                                  rarity=np.arange(count) == 0), set()
    for sampler.epoch in range(100):
        seen |= {draw % count for keys in sampler for _, draw in keys}
    assert seen == {*range(count)}


@pytest.mark.parametrize('often, seldom', [(44, 2), (25, 24), (49, 0), (1, 10)])
def test_no_image_of_a_frequent_class_comes_less_often_for_those_of_rare_ones(often, seldom):
    """Drawn in proportion to how rare they are, 34 % of those of the commonest class were missing in an epoch."""
    rarity = np.array([1.] * often + [10.] * seldom + [0.] * (100 - often - seldom))
    sampler = WindowSampler(100, train_unet.CONFIG, rarity=rarity)
    for sampler.epoch in range(20):
        draws = Counter(draw % 100 for keys in sampler for _, draw in keys)
        assert set(range(often + seldom)) <= draws.keys() and sum(draws[n] for n in range(often + seldom)) == 90


def test_how_rare_a_class_is_training_images_tell(tmp_path):
    """No class counts as more than ten times rarer than the commonest."""
    found = [{0, 1}, {0, 1, 255}, {0, 255}, {1, 2}, {0, 3}, {1}, {2}]
    assert train_unet.rarities(found, np.array([0, 0, 0, 0, 1, 0, 1])).tolist() == [1, 1, 0, 4, 4, 1, 4]
    assert train_unet.rarities([{0, 1}] * 30 + [{0, 2}], np.zeros(31, int)).tolist() == [1] * 30 + [10]


@pytest.mark.parametrize('settings, are_weighed', [
    ({}, True), ({'loss': 'auto'}, True), ({'loss': 'dice'}, False), ({'loss': 'ce'}, False),
    ({'loss': 'focal'}, False), ({'class_weights': None}, False), ({'loss': 'focal', 'class_weights': 'auto'}, True)])
def test_more_than_two_classes_are_weighed_unless_typed_otherwise(tmp_path, settings, are_weighed):
    """Pedestrians and bicyclists of camvid were not found without (README)."""
    config, data = inspect(two_classes(tmp_path, 12, 8, 20), oversample_foreground=0.9, **settings)
    weights = train_unet.build_class_weights({**config, 'num_classes': 3}, data)
    assert (weights is not None) is are_weighed
    if are_weighed:
        assert weights[0] < weights[1] < weights[2]


@pytest.mark.parametrize('share, wish, are_weighed', [
    (0.9, 'multiclass', False), (0.9, 'auto', True), (0.0, 'multiclass', True), (0.3, 'multiclass', True)])
def test_where_images_come_several_times_classes_are_weighed_only_if_that_is_typed(tmp_path, share, wish, are_weighed):
    """Defects of magnetic tiles: 0.511 with both, 0.574 without weights (means of five seeds)."""
    config, data = inspect(two_classes(tmp_path, 8, 4, 20), oversample_foreground=share, class_weights=wish)
    weights = train_unet.build_class_weights({**config, 'num_classes': 3}, data)
    assert (weights is not None) is are_weighed


def test_two_classes_are_weighed_only_where_that_is_typed(tmp_path):
    folder = sparse_set(tmp_path, shown=10)
    for wish, are_weighed in ('multiclass', False), ('auto', True):
        config, data = inspect(folder, class_weights=wish)
        weights = train_unet.build_class_weights({**config, 'num_classes': 2}, data)
        assert (weights is not None) is are_weighed


def test_that_images_come_several_times_is_said(tmp_path):
    for shown, share, is_said in (3, 0.5, True), (3, 0.1, False), (10, 0.5, False), (0, 0.5, False):
        _, data = inspect(sparse_set(tmp_path / f'{shown}', shown=shown), val_fraction=0.0, oversample_foreground=share)
        assert any('15% of the training images show foreground: they come' in note for note in data.notes) == is_said


# --- data workers and shared memory ---------------------------------------------------


@pytest.mark.parametrize('megabytes, workers, ahead', [(64, 1, 1), (200, 3, 1), (4000, 3, 4)])
def test_workers_fit_into_the_shared_memory_of_a_container(tmp_path, monkeypatch, megabytes, workers, ahead):
    """Docker gives 64 MiB, and a worker that finds no room dies: 16 images of 800 x 800 x 3 bytes and masks are 41."""
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(2**33, 0, megabytes * 2**20))
    monkeypatch.setattr(train_unet, 'num_cores', lambda: 4)
    draw_set(tmp_path / 'set')
    typed = {'data': str(tmp_path / 'set'), 'image_size': 800, 'batch_size': 16}
    config, sources, _ = train_unet.resolve_config(None, typed)
    data = train_unet.inspect_data(config)
    gpu = train_unet.Hardware('cuda', '', memory=2**34)
    config |= {'image_dtype': 'uint8', 'mean': [0] * 3, 'std': [1] * 3}
    config, why = train_unet.settle(config, gpu, data, False)
    assert config['num_workers'] == workers and ('shm' in why['num_workers']) == (workers < 3)
    images = train_unet.SegmentationDataset(data, 'train', {**config, 'cache_images': False}, is_training=True)
    assert train_unet.build_loader(images, config, torch.device('cpu')).prefetch_factor == ahead


def test_more_workers_than_the_shared_memory_holds_are_warned_of(tmp_path, monkeypatch, caplog):
    images, config = dataset(draw_set(tmp_path / 'set'), image_size=800, batch_size=16, num_workers=6)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(2**33, 0, 64 * 2**20))
    train_unet.build_loader(images, config, torch.device('cuda'))
    assert 'num_workers=6: /dev/shm has room for 1 batches only' in caplog.text and '--shm-size' in caplog.text


@pytest.mark.skipif(sys.platform != 'linux', reason='shared memory is /dev/shm')
def test_without_shared_memory_workers_are_warned_of(tmp_path, monkeypatch, caplog):
    images, config = dataset(draw_set(tmp_path / 'set'), num_workers=2)
    monkeypatch.setattr(os, 'access', lambda path, mode: path != '/dev/shm')           # read-only, or not there
    train_unet.build_loader(images, config, torch.device('cuda'))
    assert 'num_workers=2: /dev/shm has room for 0 batches only' in caplog.text
    monkeypatch.setattr(sys, 'platform', 'darwin')                     # which has none
    assert train_unet.batches_that_fit(2**30) > 1000


@pytest.mark.parametrize('steps, room', [(1, 4), (2, 3), (3, 2), (4, 0)])
def test_without_pinned_memory_what_is_at_work_stays_in_shared_memory(tmp_path, monkeypatch, caplog, steps, room):
    """On a CPU the batches of a step, and of the one before, are still there while the workers make the next: with room
    for one batch (and a half) a worker died at its second."""
    images, config = dataset(draw_set(tmp_path / 'set'), image_size=64, num_workers=5, accumulation_steps=steps)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(0, 0, 9 * images.batch_bytes()))
    for kind, held in ('cuda', 0), ('cpu', 6 - room):
        caplog.clear()
        train_unet.build_loader(images, config, torch.device(kind))
        assert (f'has room for {room} batches only' in caplog.text) == bool(held), kind
    found = train_unet.inspect_data({**config, 'data': str(tmp_path / 'set')})
    images = train_unet.SegmentationDataset(found, 'val', config, is_training=False)
    for kind, workers in ('cuda', 5), ('cpu', 4):
        assert train_unet.build_loader(images, config, torch.device(kind)).num_workers == workers


def test_masks_of_a_batch_leave_a_worker_by_one_file_descriptor(small_set):
    """Each was one of its own: 4 batches of 256 masks took 1,024, the usual limit, and the worker died."""
    data, config = dataset(small_set, 'val', num_workers=1, cache_images=True)
    loader = train_unet.build_loader(data, config, CPU, batch_sampler=[[0, 1]])
    [batch] = loader
    train_unet.stop_workers(loader)
    first, second = batch['full_mask']
    assert type(batch['full_mask']) is list
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert all(torch.equal(mask, data[row]['full_mask']) for row, mask in enumerate(batch['full_mask']))


@pytest.mark.parametrize('workers', ['auto', 2])
def test_a_process_of_a_pool_loads_its_own_data(small_set, monkeypatch, caplog, workers):
    """Ten settings in a multiprocessing.Pool: "daemonic processes are not allowed to have children", in the first epoch
    on a CPU, and in the trial step with the defaults of a GPU."""
    monkeypatch.setitem(multiprocessing.current_process()._config, 'daemon', True)
    config, sources, _ = train_unet.resolve_config(None, {'data': str(small_set), 'num_workers': workers})
    with caplog.at_level('INFO'):
        config, *_ = train_unet.prepare(config, sources, CPU)
    assert config['num_workers'] == 0 and 'num_workers = 0  (a process of multiprocessing.Pool' in caplog.text



@pytest.mark.parametrize('policy, side, workers', [('resize', 64, 2), ('resize', 2400, 1), ('resize', 4000, 0),
                                                   ('crop', 2400, 1), ('crop', 4000, 0)])
def test_validation_needs_shared_memory_for_masks_at_their_own_size(tmp_path, monkeypatch, policy, side, workers):
    """8 masks of 2400 x 2400 are 46 MB beside the images at network size; one image and its masks in other policies."""
    folder = draw_set(tmp_path / 'set')
    data, config = dataset(folder, image_size=32, batch_size=8, num_workers=2, size_policy=policy)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(2**33, 0, (
        100 if policy == 'resize' else 60) * 10**6))
    found = train_unet.inspect_data({**config, 'data': str(folder)})
    found.sizes = {(side, side): 1}
    images = train_unet.SegmentationDataset(found, 'val', config, is_training=False)
    count = 8 if policy == 'resize' else 1
    loader = train_unet.build_loader(images, config, torch.device('cuda'), batch_size=count)
    assert loader.num_workers == workers


ORPHANS = '''
import os, signal, time, torch, train_unet
parent = os.getpid()

def wait(*_):
    while os.getppid() == parent:
        time.sleep(0.01)

def start_late(number):
    signal.signal = wait                                               # what it does last
    train_unet.start_worker(number)

loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context='fork',
                                     worker_init_fn=start_late)
with open('workers.txt', 'w') as file:
    batches = iter(loader)
    print(*(worker.pid for worker in batches._workers), file=file)
    file.flush()
    os.kill(parent, signal.SIGKILL)
'''


def test_workers_end_with_a_training_that_is_killed_as_they_start(forks):
    """torch's own watch takes whoever is a worker's parent after its first lines for the one that started it."""
    process = multiprocessing.get_context('forkserver').Process(target=exec, args=(ORPHANS, {'__name__': 'orphans'}))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    pids = open('workers.txt').read().split()
    deadline = time.monotonic() + 20                                   # torch looks every five seconds
    while (left := [*filter(lives, pids)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert len(pids) == 2 and not left


class Collected:
    """Garbage that only the collector finds, as a tensor in a circle of references; it says which process freed it."""

    def __init__(self):
        self.me = self

    def __del__(self):
        with open('freed.txt', 'a') as file:
            print(os.getpid(), file=file)


class Collecting(torch.utils.data.Dataset):
    """Samples during which the collector comes."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        gc.collect()
        return index


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no process inherits anything here')
def test_a_worker_frees_nothing_that_it_inherited():
    """A tensor of a GPU that is freed there aborts the worker: CUDA does not work in a forked process."""
    gc.disable()
    try:
        Collected()
        loader = train_unet.build_loader(Collecting(), {**train_unet.CONFIG, 'num_workers': 1}, CPU, batch_size=1)
        assert len([*loader]) == 2
    finally:
        gc.enable()
    gc.collect()
    assert open('freed.txt').read().split() == [str(os.getpid())]


# --- what is changed suits the images --------------------------------------------------


def far_from_zero(folder, level, spread, dtype, channels, size=24):
    """Eight TIFFs of noise of this level and spread, with a brighter disc."""
    y, x = np.mgrid[:size, :size]
    disc = (y - 11) ** 2 + (x - 11) ** 2 < 36
    for n in range(8):
        noise = np.random.default_rng(n).normal(level, spread, (size, size, channels)) + 2 * spread * disc[..., None]
        (folder / 'images').mkdir(exist_ok=True)
        kind = 'rgb' if channels == 3 else 'minisblack'
        tifffile.imwrite(folder / f'images/{n}.tif', noise.astype(dtype), photometric=kind, planarconfig='contig')
        save(folder / f'masks/{n}.png', 255 * disc)
    return folder


@pytest.mark.parametrize('level, spread', [(25, 20), (120, 50), (215, 30)])
def test_brightness_makes_no_page_white_or_black(level, spread):
    """One of eight X-rays became white, with its mask still asked for."""
    config = {**train_unet.CONFIG, 'mean': [level] * 3, 'std': [spread] * 3}
    jitter = train_unet.build_jitter(config, 0.3, 1.0)
    image = np.repeat(np.array([[level - spread, level, level + spread]], np.uint8)[..., None], 3, axis=2)
    seen = [jitter(image=image)['image'][0, :, 0].astype(int) for _ in range(300)]
    assert all(dark < middle < bright for dark, middle, bright in seen)
    assert len({*map(tuple, seen)}) > 10                               # it does something


@pytest.mark.parametrize('level, spread, dtype, channels', [(1000, 5, 'float32', 3), (200, 2.5, 'uint8', 3),
                                                            (1000, 5, 'float32', 6)])
@pytest.mark.parametrize('how', [{'augment': 'strong'}, {'size_policy': 'crop', 'augment': 'none'},
                                 {'num_epochs': 90}], ids=['strong', 'crop', 'default'])
def test_nothing_is_far_from_what_the_images_hold(tmp_path, level, spread, dtype, channels, how):
    """Raw zeros around a turned or padded image would be a hundred deviations away, and rule all norms; a fifth of the
    scale more brightness would be twenty."""
    how = how | {'in_channels': channels}
    read, config = dataset(far_from_zero(tmp_path, level, spread, dtype, channels), **how)
    train_unet.settle_statistics(config, read)
    data = train_unet.SegmentationDataset(inspect(tmp_path, in_channels=channels)[1], 'train', config, is_training=True)
    made = [data[epoch, index] for epoch in range(9) for index in range(len(data))]
    mean, std = (np.reshape(config[key], (-1, 1, 1)) for key in ('mean', 'std'))
    assert max(np.abs((sample['image'].numpy() - mean) / std).max() for sample in made) < 12
    assert any((sample['mask'] == 255).any() for sample in made)


@pytest.mark.parametrize('mean, std, is_told', [
    ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], True), ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4], False),
    ([0.5], 'auto', False), ('auto', [0.2], True), ('auto', [60.0], False), ('auto', 'auto', False),
    ([100.0], [9e4], True)])
def test_a_mean_in_another_unit_than_the_images_is_told(small_set, caplog, mean, std, is_told):
    """ImageNet's from 0 to 1, as tutorials print them, made inputs of up to 1,100 out of 8 bits."""
    read, config = dataset(small_set, mean=mean, std=std)
    typed = {'mean': mean, 'std': std}
    why = train_unet.settle_statistics(config, read)
    assert why == {key: 'of the training images' for key in typed if typed[key] == 'auto'}
    assert ('or type them in the unit of the images' in caplog.text) == is_told


def test_a_channel_that_is_the_same_everywhere_is_in_no_other_unit(small_set, caplog):
    """Red and green of a microscope as RGB, with ImageNet's mean."""
    for path in (small_set / 'images').iterdir():
        save(path, np.random.default_rng(1).integers(0, 256, (40, 40, 3)) * np.array([1, 1, 0]))
    read, config = dataset(small_set, mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4])
    train_unet.settle_statistics(config, read)
    assert 'or type them in the unit of the images' not in caplog.text


@pytest.mark.parametrize('encoder, mean, std', [
    ('tu-tf_efficientnet_lite0', [127.5] * 3, [127.5] * 3), ('tu-resnet10t', [123.675, 116.28, 103.53], None),
    ('tu-vit_base_patch16_clip_224', [122.77, 116.75, 104.09], None), ('resnet34', [123.675, 116.28, 103.53], None),
    ('timm-resnest14d', [123.675, 116.28, 103.53], None), ('timm-mobilenetv3_large_075', [127.5] * 3, [127.5] * 3)])
def test_pretrained_weights_get_images_as_they_were_trained_on(small_set, encoder, mean, std):
    """A third of timm's weights were trained with another mean than ImageNet's (timm's own table of each name). What a
    server would have to be asked for, here smp's resnet34, is ImageNet's where none can be reached."""
    read, config = dataset(small_set, in_channels=3, encoder=encoder, encoder_weights='imagenet')
    assert {*train_unet.settle_statistics(config, read).values()} == {'of encoder_weights'}
    assert config['mean'] == pytest.approx(mean, abs=0.01)
    assert config['std'] == pytest.approx(std or config['std'], abs=0.01)
    grey, config = dataset(small_set, in_channels=1, encoder=encoder, encoder_weights='imagenet')
    train_unet.settle_statistics(config, grey)                         # its kernels are summed: as grey RGB
    assert config['mean'] == pytest.approx([np.mean(mean)], abs=0.01)


def test_images_of_another_depth_have_a_mean_of_their_own(small_set):
    """0 and 1 would pass for images of the scale of mean 100, deviation 60."""
    known = {**train_unet.CONFIG, 'mean': [100.0], 'std': [60.0], 'image_dtype': 'uint8'}
    model = train_unet.SegmentationModel(torch.nn.Identity(), known)
    read, config = dataset(small_set, mean='auto', std='auto')
    assert train_unet.usual_statistics(config, read, model)[2] == 'of the network that goes on'
    half = np.arange(1600).reshape(40, 40) % 2
    for path in (small_set / 'images').iterdir():
        save(path, np.uint16(65535 * half))
    read, config = dataset(small_set, mean='auto', std='auto', image_dtype='float32')
    assert train_unet.usual_statistics(config, read, model)[2] == 'of the training images'


def test_of_several_processes_the_first_alone_asks_what_the_weights_want(small_set, monkeypatch):
    """Another might not reach the server, and train on images of another scale."""
    read, config = dataset(small_set, in_channels=3, encoder='resnet34', encoder_weights='imagenet')
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(1, 2))
    monkeypatch.setattr(train_unet, 'encoder_statistics', lambda _: pytest.fail('asked'))
    monkeypatch.setattr(train_unet.dist, 'broadcast_object_list', lambda answer: answer.__setitem__(0, [[1.0], [2.0]]))
    train_unet.settle_statistics(config, read)
    assert (config['mean'], config['std']) == ([1.0], [2.0])


@pytest.mark.parametrize('more', [
    {'encoder_weights': None}, {'image_dtype': 'float32'}, {'in_channels': 4}, {'mean': [9.0], 'std': [9.0]}])
def test_only_images_like_those_of_pretrained_weights_get_their_statistics(small_set, monkeypatch, more):
    monkeypatch.setattr(train_unet, 'encoder_statistics', lambda _: pytest.fail('asked'))
    for path in small_set.glob('images/*') if 'in_channels' in more else ():
        save(path, np.dstack([train_unet.read_image(path, train_unet.CONFIG)] * 2)[..., :4])
    read, config = dataset(small_set, **{'in_channels': 3, 'encoder_weights': 'imagenet'} | more)
    train_unet.settle_statistics(config, read)
    assert len(config['mean']) == len(more.get('mean', [0] * config['in_channels']))


@pytest.mark.parametrize('size', [(16, 16), (60, 16)])
def test_thin_things_are_not_lost_where_a_side_is_more_than_halved(size):
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 2] = 1                                                     # a quarter of the pixels that it lies in
    assert train_unet.resize(mask, *size, is_mask=True).any()
    assert train_unet.resize(mask.T, *size[::-1], is_mask=True).any()


@pytest.mark.parametrize('old, new', [(64, 32), (64, 40), (64, 64), (60, 30), (64, 16), (60, 15)])
def test_masks_that_shrink_stay_where_their_images_are(old, new):
    """The nearest pixel of two is always the second one: masks would lie half a pixel beside their images."""
    shifts = []
    for seed in range(40):
        cy, cx, radius = np.random.default_rng(seed).uniform((20, 20, 5), (40, 40, 12))
        y, x = np.mgrid[:old, :old]
        disc = ((y - cy) ** 2 + (x - cx) ** 2 < radius ** 2).astype(np.uint8)
        weights = [train_unet.resize(255 * disc, new, new).astype(float),
                   train_unet.resize(disc, new, new, is_mask=True).astype(float)]
        places = [[(weight * at).sum() / weight.sum() for at in np.mgrid[:new, :new]] for weight in weights]
        shifts.append(np.subtract(*places))
    assert np.abs(np.mean(shifts, 0)).max() < 0.03


def test_a_line_of_one_pixel_outlives_halving():
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 31] = 1
    small = train_unet.resize(mask, 32, 32, is_mask=True)
    assert small.any(1).mean() == 0.5 and small[:, 15].sum() == small.sum()


def test_masks_of_which_one_side_grows_stay_where_their_images_are():
    """Both sides took the nearest pixel, of two the second one: beside the image, and every other line was lost."""
    shifts = []
    for seed in range(40):
        cy, cx, radius = np.random.default_rng(seed).uniform((20, 20, 5), (40, 40, 12))
        y, x = np.mgrid[:64, :64]
        disc = ((y - cy) ** 2 + (x - cx) ** 2 < radius ** 2).astype(np.uint8)
        weights = [train_unet.resize(255 * disc, 32, 128).astype(float),
                   train_unet.resize(disc, 32, 128, is_mask=True).astype(float)]
        places = [[(weight * at).sum() / weight.sum() for at in np.mgrid[:32, :128]] for weight in weights]
        shifts.append(np.subtract(*places))
    assert np.abs(np.mean(shifts, 0)).max() < 0.05
    line = np.zeros((20, 64), np.uint8)
    line[:, 30] = 1
    assert train_unet.resize(line, 32, 32, is_mask=True).any()


# --- mean and deviation of the images -------------------------------------------------


def test_wide_integers_beside_8_bits_are_8_bits_where_that_is_typed(tmp_path):
    as_wide = lambda path, pixels: np.save(path.with_suffix('.npy'), pixels.astype(np.int64))
    data, config = dataset(two_kinds(tmp_path, as_png, as_wide), in_channels=1, image_dtype='uint8')
    assert 100 < train_unet.image_statistics(data, config)[0][0] < 155


def test_a_constant_band_is_not_blown_up(tmp_path):
    for n in range(6):
        pixels = np.random.default_rng(n).integers(0, 255, (32, 32, 3)) * np.array([1, 1, 0])
        save(tmp_path / f'set/images/{n}.png', pixels)
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.mgrid[:32, :32][0] > 16))
    data, config = dataset(tmp_path / 'set')
    assert train_unet.image_statistics(data, config)[1][2] == 1


def test_images_of_two_scales_in_one_set_are_refused(tmp_path):
    for top in (1, 255):
        data, config = dataset(two_kinds(tmp_path / f'{top}', as_png, as_float(top)), in_channels=1)
        if top == 1:
            assert 0.4 < train_unet.image_statistics(data, config)[0][0] < 0.6
            continue
        with pytest.raises(DataError, match=r'goes up to 25.*, as it is stored as float or wide integers, while'):
            train_unet.image_statistics(data, config)


def test_validation_images_of_another_scale_are_refused_by_name(tmp_path):
    """Training images of 8 bits become 0 to 1 beside floats; floats of 0 to 255 are none of theirs."""
    for number in range(8):
        split, suffix = ('train', 'png') if number < 6 else ('val', 'npy')
        image = np.random.default_rng(number).integers(0, 256, (32, 48, 3)).astype(np.float32)
        save(tmp_path / f'{split}/images/{number}.{suffix}', image)
        save(tmp_path / f'{split}/masks/{number}.png', block(255))
    with pytest.raises(DataError, match=r'val/images/6.npy: values around 1\d\d.* are far from the mean of'):
        train_unet.train(data=str(tmp_path), **TINY)


# --- settling -------------------------------------------------------------------------


def test_one_deep_image_among_shallow_ones_makes_all_float(tmp_path):
    """It may be any of them; the others keep their brightness."""
    folder = draw_set(tmp_path / 'set', count=40, size=16)
    save(folder / 'images/029.png', np.full((16, 16), 30000), 'I;16')
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'uint8 and uint16'
    save(folder / 'images/029.png', np.full((16, 16), 200))
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'uint8'


def test_colours_of_16_bits_are_known_as_deep(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=4)
    deep_colours(folder / 'images/2.png', size=(4, 16))
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'uint8 and uint16'


@pytest.mark.parametrize('kind, count, epochs', [
    ('cpu', 400, 20), ('cpu', 9000, 10), ('cuda', 400, 80), ('cuda', 10, 200), ('cuda', 9000, 20)])
@pytest.mark.parametrize('batch_size', [8, 16])
def test_usual_epochs_and_workers(small_set, monkeypatch, kind, count, epochs, batch_size):
    """About 8,000 images on a CPU and 32,000 on a GPU, at least 10 and 20 epochs, at most 200; a core is left free. A
    larger batch, as of preset fast, is not more work."""
    monkeypatch.setattr(train_unet, 'num_cores', lambda: 4)
    config, data = inspect(small_set, batch_size=batch_size)
    data.pairs.images = np.repeat(data.pairs.images, -(-count // 9))[:count]
    data.pairs.masks, data.pairs.splits = data.pairs.images, np.zeros(count, np.int8)
    data.rarity = np.ones(count)
    settled, _ = train_unet.settle({**config, 'image_dtype': 'uint8'}, train_unet.Hardware(kind, ''), data, False)
    assert settled['num_epochs'] == epochs and settled['num_workers'] == (0 if kind == 'cpu' else 3)


@pytest.mark.parametrize('kind, typed, share', [
    ('cpu', {}, 0.18), ('cuda', {}, 0.0), ('cpu', {'encoder': 'resnet18'}, 0.0), ('cpu', {'architecture': 'PAN'}, 0.0),
    ('cpu', {'image_size': 96}, 0.0), ('cpu', {'size_policy': 'crop'}, 0.0), ('cpu', {'compile_model': True}, 0.0),
    ('cuda', {'progressive_resizing': 0.3}, 0.3), ('cpu', {'progressive_resizing': 0}, 0.0)])
def test_the_default_network_begins_with_small_images_on_a_cpu(small_set, kind, typed, share):
    config, data = inspect(small_set, **{'image_size': 128, **typed})
    settled, _ = train_unet.settle({**config, 'image_dtype': 'uint8'}, train_unet.Hardware(kind, ''), data, False)
    assert settled['progressive_resizing'] == share


@pytest.mark.parametrize('kind, encoder, first', [
    ('cpu', 'auto', 128), ('cpu', 'tu-resnet10t', 128), ('cpu', 'resnet18', 256), ('cuda', 'auto', 256),
    ('cuda', 'tu-resnet10t', 256)])
def test_only_the_smallest_network_has_half_the_decoder(small_set, kind, encoder, first):
    """Others lose by it what they were chosen for: camvid with a pretrained efficientnet 0.49 in place of 0.54."""
    config, data = inspect(small_set, encoder=encoder, decoder_channels='auto')
    settled, _ = train_unet.settle({**config, 'image_dtype': 'uint8'}, train_unet.Hardware(kind, ''), data, False)
    assert settled['decoder_channels'] == [first // 2**n for n in range(5)]


@pytest.mark.parametrize('classes, last', [(2, 8), (8, 8), (9, 16), (17, 16)])
def test_the_smallest_network_does_not_end_in_fewer_channels_than_classes(small_set, classes, last):
    config, data = inspect(small_set, encoder='auto', decoder_channels='auto', num_classes=classes)
    settled, _ = train_unet.settle({**config, 'image_dtype': 'uint8'}, train_unet.Hardware('cpu', ''), data, False)
    assert settled['decoder_channels'] == [128, 64, 32, 16, last]


@pytest.mark.parametrize('side, policy, is_told', [
    (1200, 'resize', True), (400, 'resize', False), (1200, 'crop', False)])
def test_images_that_become_small_are_told_of_crops(small_set, side, policy, is_told):
    config, data = inspect(small_set, image_size='auto', size_policy=policy)
    data.sizes = train_unet.Counter({(side, side): 12})
    settled, why = train_unet.settle({**config, 'image_dtype': 'uint8'}, Hardware('cpu', ''), data, False)
    assert settled['image_size'] == [256, 256] and ('size_policy=crop' in why['image_size']) == is_told


@pytest.mark.parametrize('settings, rate, told', [
    ({'batch_size': 64, 'optimizer': 'SGD'}, 0.1, '; 0.1 at most'), ({'batch_size': 512}, 0.01, '; 0.01 at most'),
    ({'batch_size': 32}, 0.004, 'effective batch of 32'),
    ({'optimizer': 'rmsprop'}, 0.002, 'effective batch of 8'), ({'optimizer': 'ASGD'}, 0.02, 'effective batch of 8'),
    ({'optimizer': 'adadelta', 'batch_size': 32}, 1.0, 'the default of torch.optim.Adadelta')])
def test_the_learning_rate_says_its_rule(settings, rate, told):
    found, why = train_unet.usual_rate({**train_unet.CONFIG, **settings})
    assert found == rate and why.endswith(told)


def test_the_learning_rate_is_that_of_the_images_that_there_are(small_set):
    config, data = inspect(small_set, batch_size=8, accumulation_steps=100)
    count = len(data.pairs.rows('train'))
    settled, why = train_unet.settle({**config, 'image_dtype': 'uint8'}, Hardware('cpu', ''), data, False)
    assert f'an effective batch of {count}' in why['learning_rate'] and count < 20
    assert settled['learning_rate'] == pytest.approx(2e-3 * (count / 8) ** 0.5, rel=0.03)
    assert train_unet.usual_rate(train_unet.CONFIG, 3)[0] == 0.002     # a smaller rate made fewer images learn less


@pytest.mark.parametrize('kind, free, workers', [('mps', 2**33, 0), ('mps', 2**10, 3), ('cuda', 2**33, 3)])
def test_apple_gpus_want_no_workers_where_the_images_fit(monkeypatch, small_set, kind, free, workers):
    """They are spawned there, and share no memory."""
    monkeypatch.setattr(train_unet, 'num_cores', lambda: 4)
    monkeypatch.setattr(train_unet, 'free_memory', lambda: free)
    config, data = inspect(small_set, image_size=32)
    settled, _ = train_unet.settle({**config, 'image_dtype': 'uint8'}, Hardware(kind, ''), data, False)
    assert settled['num_workers'] == workers


def test_where_workers_share_no_memory_that_is_why_no_images_are_kept(monkeypatch, small_set):
    monkeypatch.setattr(sys, 'platform', 'win32')
    config, data = inspect(small_set, image_size=32)
    settled, why = train_unet.settle({**config, 'image_dtype': 'uint8', 'num_workers': 2}, Hardware('cuda', ''), data,
                                     False)
    assert (settled['cache_images'], why['cache_images']) == (False, 'workers would not share them')


@pytest.mark.parametrize('processes, fits', [(1, True), (8, False)])
def test_processes_of_one_machine_share_the_memory_for_their_images(monkeypatch, small_set, processes, fits):
    monkeypatch.setenv('LOCAL_WORLD_SIZE', str(processes))
    monkeypatch.setattr(train_unet, 'free_memory', lambda: 2**20)      # of which 12 images want a fifteenth
    config, data = inspect(small_set, image_size=32)
    settled, why = train_unet.settle({**config, 'image_dtype': 'uint8'}, Hardware('cpu', ''), data, False)
    assert settled['cache_images'] is fits, why['cache_images']


@pytest.mark.parametrize('channels', [1, 3, 4])
def test_a_batch_has_the_strides_of_channels_last_or_where_there_is_one_channel_the_usual(channels):
    """With channels_last=False a whole network would run in channels_last."""
    images = [torch.randint(0, 256, (6, 5, channels), dtype=torch.uint8).permute(2, 0, 1) for _ in range(3)]
    masks = torch.zeros(6, 5, dtype=torch.uint8)
    made = train_unet.collate([{'image': image, 'mask': masks, 'index': 0, '_left_out': False} for image in images])
    wanted = torch.stack(images).contiguous(memory_format=torch.channels_last)
    assert torch.equal(made['image'], wanted) and made['image'].stride() == wanted.stride()


def test_means_of_another_number_of_bands_are_refused_in_words(tmp_path):
    """Of more than four bands what lies around an image was looked up before."""
    for n in range(6):
        save(tmp_path / f'images/{n}.npy', np.random.default_rng(n).random((32, 32, 5), np.float32))
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(32))
    with pytest.raises(ConfigError, match='3 numbers for in_channels=5'):
        train_unet.check(data=str(tmp_path), in_channels=5, mean=[0.5] * 3, std=[0.2] * 3, **TINY)


def test_a_typed_cache_that_does_not_fit_is_told(monkeypatch, small_set, caplog):
    for typed, free in ((True, 2**10), (True, 2**17), (True, 0), (False, 2**10), ('auto', 2**10)):     # 0: unknown
        monkeypatch.setattr(train_unet, 'free_memory', lambda: free)
        config, data = inspect(small_set, image_size=32, cache_images=typed)
        train_unet.settle({**config, 'image_dtype': 'uint8'}, Hardware('cpu', ''), data, False)
        assert (typed is True and free == 2**10) == ('cache_images=True: the images take' in caplog.text)
        caplog.clear()


def test_a_pipeline_of_12_bits_is_refused(tmp_path):
    """Its images would lie within a sixteenth of 0..1, which a change of brightness makes black."""
    for most, is_refused in ((4095.0, True), (65535.0, False), (255.0, False), (1.0, False), (None, False)):
        path = saved(tmp_path / 'a.json', A.Sequential([A.ToFloat(max_value=most), A.RandomBrightnessContrast()]))
        if is_refused:
            with pytest.raises(ConfigError, match='leave out ToFloat'):
                train_unet.load_augmentation(path, (32, 32, 1), 'float32')
        else:
            assert train_unet.load_augmentation(path, (32, 32, 1), 'float32') is not None


def test_a_data_set_knows_whether_its_masks_may_hold_255(small_set):
    plain = {'augment': 'none', 'num_epochs': 1}
    assert dataset(small_set, **plain, skip_broken=True)[0].ignores    # a file may break
    assert not dataset(small_set, **plain, mask_values={0: 0, 255: 1, 7: 255})[0].ignores            # no mask holds 7


def test_data_that_is_on_the_gpu_already_is_not_pinned(monkeypatch):
    """torch's own pinning would refuse it. Meta tensors stand for those of a GPU."""
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda tensor: tensor + 1 if tensor.device.type == 'cpu' else 1 / 0)
    there = train_unet.Plain([{'x': torch.zeros(2, device='meta'), 'y': torch.ones(1)} for _ in range(4)], 0)
    loader = train_unet.build_loader(there, {**train_unet.CONFIG, 'num_workers': 0}, torch.device('cuda'), batch_size=2)
    assert not loader.pin_memory
    assert [(batch['x'].device.type, batch['y'].tolist()) for batch in loader] == [('meta', [[2], [2]])] * 2


def test_masks_of_which_one_side_grows_hold_no_value_of_their_own():
    mask = np.zeros((20, 64), np.uint8)
    mask[5:15, 20:40] = 9
    assert {*train_unet.resize(mask, 45, 32, is_mask=True).ravel()} == {0, 9}
