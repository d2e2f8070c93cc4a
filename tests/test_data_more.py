"""More of the data part: united masks, typed answers, depths, saved augmentations, what is refused and how.

Run: python -m pytest tests/test_data_more.py
"""
import contextlib
import csv
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import tracemalloc
import zlib
from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import PIL.Image
import pytest
import scipy.io
import tifffile
import torch
import yaml
from conftest import TINY, draw_set
from test_data import ask, coded_set, dataset, fill, inspect, names_of, offered, partners, save, typed

import train_unet
from train_unet import ConfigError, DataError

WORDS = [f'{key}={value}' for key, value in TINY.items() if value is not None]


# --- helpers -------------------------------------------------------------------------


def objects(folder, names):
    """Masks of 8 x 8 with one row each of 255: the first in row 0, the second in row 1, ..."""
    for row, name in enumerate(names):
        mask = np.zeros((8, 8))
        mask[row] = 255
        save(folder / name, mask)


def mask_of(data, config, stem):
    """The class ids of the image with this stem."""
    images = [Path(os.fsdecode(path)).stem for path in data.pairs.images]
    path = os.fsdecode(data.pairs.masks[images.index(stem)])
    return data.coding.encode(train_unet.read_mask(path, config), path)


def typed_words(words):
    """Overrides of a line that is split already."""
    overrides, others = train_unet.parse_overrides(words)
    assert not others
    return overrides


def no_waiting(monkeypatch):
    """A file that fails is tried again at once."""
    monkeypatch.setattr(train_unet.time, 'sleep', lambda seconds: None)


def test_a_class_that_only_validation_has_is_told(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    for split, value in (('train', 1), ('val', 2)):
        for n in range(2):
            save(folder / f'images/{split}/{n}.png', np.zeros((8, 8, 3)))
            save(folder / f'masks/{split}/{n}.png', np.array([[0] * 8, [1] * 8, *[[value] * 8] * 6]))
    for n in range(3):
        (folder / f'images/{n}.png').unlink()
        (folder / f'masks/{n}.png').unlink()
    _, data = inspect(folder)
    assert [note for note in data.notes if note.startswith('class 2 is in no training mask')]
    assert not [note for note in data.notes if note.startswith('class 1')]


# --- folders of object masks ---------------------------------------------------------


def test_folder_that_holds_the_image_too_is_not_united(tmp_path):
    """p1/scan.png beside p1/mask_a.png: the union of the folder would hold the scan itself."""
    for p in 'abc':
        fill(tmp_path / 'set', [f'p{p}/scan.png'], [f'p{p}/mask_a.png', f'p{p}/mask_b.png'])
    error = ask(tmp_path / 'set')
    assert error.title == 'images and masks do not pair' and 'mask_b.png' in str(error)
    _, data = inspect(tmp_path / 'set', image_pattern='sc{stem}.png', mask_pattern='m{stem}_b.png')
    assert partners(data, tmp_path / 'set') == {f'p{p}/scan.png': f'p{p}/mask_b.png' for p in 'abc'}


def dsb(folder, without):
    """Four images in the layout of DSB-2018; one of them has no masks."""
    for n in range(4):
        fill(folder, [f'id{n}/images/id{n}.png'], [])
        if n != without:
            objects(folder, [f'id{n}/masks/{n}a.png', f'id{n}/masks/{n}b.png'])
    return folder


def test_image_without_object_masks_is_named(tmp_path):
    error = ask(dsb(tmp_path / 'set', 2))
    assert [line for line in error.problems if 'image without a mask' in line] == \
        [f'image without a mask: {tmp_path}/set/id2/images/id2.png']
    assert 'mask without' not in str(error) and 'skip_unpaired=True' in str(error)


def test_image_without_object_masks_is_left_out_if_asked(tmp_path):
    config, data = inspect(dsb(tmp_path / 'set', 2), skip_unpaired=True)
    assert {Path(name).stem for name in partners(data, tmp_path / 'set')} == {'id0', 'id1', 'id3'}
    assert data.pairs.notes[0] == 'skipped 1 images and 0 masks without a partner' and 'id2.png' in data.pairs.notes[1]
    assert np.flatnonzero(mask_of(data, config, 'id3').all(1)).tolist() == [0, 1]


def test_masks_in_a_folder_of_the_image_s_name_are_united(tmp_path):
    """images/x.png with masks/x/1.png, masks/x/2.png, ...; each image has its own number of objects."""
    folder = tmp_path / 'set'
    for n, stem in enumerate('xyz', 1):
        fill(folder, [f'images/{stem}.png'], [])
        objects(folder, [f'masks/{stem}/{k}.png' for k in range(n)])
    config, data = inspect(folder)
    assert partners(data, folder) == {f'images/{stem}.png': f'masks/{stem}' for stem in 'xyz'}
    for n, stem in enumerate('xyz', 1):
        assert np.flatnonzero(mask_of(data, config, stem).all(1)).tolist() == [*range(n)]


def test_hidden_files_among_object_masks_are_ignored(tmp_path):
    """macOS leaves ._1.png beside 1.png; one of them is a sound image here, so that its use would show."""
    folder = dsb(tmp_path / 'set', None)
    save(folder / 'id1/masks/._1a.png', np.full((8, 8), 255))
    (folder / 'id2/masks/._2a.png').write_bytes(b'\0\5\x16\7')
    config, data = inspect(folder)
    for n in range(4):
        assert mask_of(data, config, f'id{n}').sum() == 16
    assert 'ignored 2 files, *.png: ._1a.png, ...' in data.notes


# --- saved augmentations -------------------------------------------------------------


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


@pytest.mark.parametrize('step, channels', [
    (A.RandomSizedBBoxSafeCrop(32, 32, p=1.0), 3), (A.HueSaturationValue(p=1.0), 5), (A.ToGray(p=1.0), 5)],
    ids=['needs boxes', 'needs 3 channels', 'needs RGB'])
def test_saved_pipeline_that_cannot_take_the_image_is_refused(tmp_path, step, channels):
    """Before training starts, not in its middle."""
    path = saved(tmp_path / 'a.json', step)
    config = {**train_unet.CONFIG, 'augment': path, 'image_size': [32, 32], 'in_channels': channels,
              'image_dtype': 'uint8'}
    with pytest.raises(ConfigError, match='that suits these images'):
        train_unet.build_augmentation(config)


# --- depths --------------------------------------------------------------------------


def test_one_deep_image_among_shallow_ones_makes_all_float(tmp_path):
    """It may be any of them; the others keep their brightness."""
    folder = draw_set(tmp_path / 'set', count=40, size=16)
    save(folder / 'images/029.png', np.full((16, 16), 30000), 'I;16')
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'float32'
    save(folder / 'images/029.png', np.full((16, 16), 200))
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'uint8'


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


def deep_colours(path, size=(6, 5), alpha=False):
    """A PNG of 16 bits per colour; -> its values, red first."""
    values = np.random.default_rng(1).integers(0, 65536, (*size, 3 + alpha)).astype(np.uint16)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), values[..., [2, 1, 0, 3][:3 + alpha]])
    return values


@pytest.mark.parametrize('alpha, channels', [(False, 3), (True, 3), (True, 4)])
def test_colours_of_16_bits_keep_their_depth_and_order(tmp_path, alpha, channels):
    """Pillow would cut them to 8 bits."""
    values = deep_colours(tmp_path / 'x.png', alpha=alpha)
    image = train_unet.read_image(str(tmp_path / 'x.png'), {**train_unet.CONFIG, 'in_channels': channels})
    assert image.dtype == np.float32
    assert image == pytest.approx(values[..., :channels] / 65535, abs=1e-6)


def test_colours_of_16_bits_are_known_as_deep(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=4)
    deep_colours(folder / 'images/2.png', size=(4, 16))
    _, data = inspect(folder)
    assert train_unet.find_image_dtype(data) == 'float32'


# --- several kinds of folders and files ----------------------------------------------


def typed_lines(error):
    """The lines to type that an error offers, without the counts."""
    return [line.strip().split('   (')[0] for line in error.problems if line.startswith('    ')]


# What people have -> the lines to type that are offered, and no others. Templates of file names: {n} counts.
OFFERED = [
    ('two kinds of masks in splits', ['images/{s}/{n}.png', 'masks_a/{s}/{n}.png', 'masks_b/{s}/{n}.png'],
     ['images="images" masks="masks_a"', 'images="images" masks="masks_b"']),
    ('two kinds of masks in a folder', ['images/x{n}.png', 'masks/x{n}_cell.png', 'masks/x{n}_core.png'],
     ['mask_pattern="{stem}_cell.png"', 'mask_pattern="{stem}_core.png"']),
    ('colours made of numbers', ['images/x{n}.png', 'masks/x{n}_color.png', 'masks/x{n}_ids.png'],
     ['mask_pattern="{stem}_ids.png"']),
    ('ACDC', ['images/x{n}.png', 'masks/x{n}_labelIds.png', 'masks/x{n}_labelColor.png', 'masks/x{n}_invGray.png'],
     ['mask_pattern="{stem}_labelIds.png"']),
    ('ACDC and Dark Zurich, suffixes of two words',
     ['rgb_anon/fog/{s}/G/G_frame_{n:06}_rgb_anon.png',
      *(f'gt/fog/{{s}}/G/G_frame_{{n:06}}_gt_{kind}.png' for kind in ('invGray', 'labelColor', 'labelIds'))],
     ['mask_pattern="{stem}gt_labelIds.png"']),
    ('Cityscapes', ['leftImg8bit/{s}/ulm/ulm_{n:06}_000019_leftImg8bit.png',
                    'gtFine/{s}/ulm/ulm_{n:06}_000019_gtFine_labelIds.png',
                    'gtFine/{s}/ulm/ulm_{n:06}_000019_gtFine_color.png'],
     ['mask_pattern="{stem}gtFine_labelIds.png"']),
    ('CHASE, two experts', ['Image_{n:02}L.jpg', 'Image_{n:02}L_1stHO.png', 'Image_{n:02}L_2ndHO.png'],
     ['image_pattern="{stem}.jpg" mask_pattern="{stem}_1stHO.png"',
      'image_pattern="{stem}.jpg" mask_pattern="{stem}_2ndHO.png"']),
    ('DRIVE', ['{s}/images/{n:02}_x.tif', '{s}/1st_manual/{n:02}_manual1.gif', '{s}/mask/{n:02}_x_mask.gif'],
     ['images="*/images" masks="*/1st_manual"']),
    ('PH2, a folder per image',
     ['IMD{n:03}/IMD{n:03}_Image/IMD{n:03}.bmp', 'IMD{n:03}/IMD{n:03}_lesion/IMD{n:03}_l.bmp'],
     ['images="IMD*/IMD*_Image" masks="IMD*/IMD*_lesion"']),
    ('STARE', ['stare-images/im{n:04}.ppm', 'labels-ah/im{n:04}.ah.ppm', 'labels-vk/im{n:04}.vk.ppm'],
     ['images="stare-images" masks="labels-ah"', 'images="stare-images" masks="labels-vk"']),
    ('Montgomery', ['CXR_png/M_{n:04}.png', 'ManualMask/leftMask/M_{n:04}.png', 'ManualMask/rightMask/M_{n:04}.png'],
     ['images="CXR_png" masks="ManualMask/leftMask"', 'images="CXR_png" masks="ManualMask/rightMask"']),
    ('FloodNet, splits inside the names of folders',
     ['{s}/{s}-org-img/{n}.jpg', '{s}/{s}-label-img/{n}_lab.png', 'ColorMasks/ColorMasks-{s}Set/{n}_lab.png'],
     ['images="*/*-org-img" masks="*/*-label-img"']),
    ('IDRiD', ['Images/a. {s} Set/I_{n:02}.jpg', 'Groundtruths/a. {s} Set/Discs/I_{n:02}_OD.tif',
               'Groundtruths/a. {s} Set/Exudates/I_{n:02}_EX.tif'],
     ['images="Images" masks="Groundtruths/a. * Set/Discs"', 'images="Images" masks="Groundtruths/a. * Set/Exudates"']),
    ('IDD, numbers inside words', ['leftImg8bit/{s}/7/frame{n:04}_leftImg8bit.jpg',
                                   'gtFine/{s}/7/frame{n:04}_gtFine_labellevel3Ids.png',
                                   'gtFine/{s}/7/frame{n:04}_gtFine_instancelevel3Ids.png'],
     ['mask_pattern="{stem}gtFine_labellevel3Ids.png"']),
    ('LIDC, several raters',
     ['P-{n:04}/images/slice-{n}.png', *(f'P-{{n:04}}/mask-{k}/slice-{{n}}.png' for k in (0, 1))],
     ['images="P-*/images" masks="P-*/mask-0"', 'images="P-*/images" masks="P-*/mask-1"']),
    ('Mapillary Vistas, two versions', ['{s}/images/a{n:02}.jpg', *(f'{{s}}/v{version}/{kind}/a{{n:02}}.png'
                                        for version in ('1.2', '2.0') for kind in ('labels', 'panoptic'))],
     ['images="*/images" masks="*/v1.2/labels"', 'images="*/images" masks="*/v2.0/labels"']),
    ('splits below a folder that holds all', ['MySet/images/{s}/{n}.png', 'MySet/masks_a/{s}/{n}.png',
                                              'MySet/masks_b/{s}/{n}.png'],
     ['images="MySet/images" masks="MySet/masks_a"', 'images="MySet/images" masks="MySet/masks_b"']),
    ('SYNTHIA, colours in capitals', ['RGB/{n:04}.png', 'GT/COLOR/{n:04}.png', 'GT/LABELS/{n:04}.png'],
     ['images="RGB" masks="GT/LABELS"']),
    ('38-Cloud', ['train_red/red_{n}.TIF', 'train_nir/nir_{n}.TIF', 'train_gt/gt_{n}.TIF'],
     ['images="train_red" masks="train_gt"']),
]


@pytest.mark.parametrize('names, lines', [row[1:] for row in OFFERED], ids=[row[0] for row in OFFERED])
def test_lines_that_pair_are_offered(tmp_path, names, lines):
    """Each was tried on the files: each pairs every image that has this kind of mask with its own."""
    folder = tmp_path / 'set'
    for n in range(12):
        split = ('train', 'val')[n % 2]
        made = [name.format(n=n, s=split) for name in names]
        fill(folder, [], made[1:])
        save(folder / made[0], np.random.default_rng(n).integers(0, 256, (8, 8, 3)))
    error = ask(folder)
    offer = typed_lines(error)
    assert set(lines) <= set(offer) and str(error).count('(12 pairs)') == len(offer)
    assert 'skip_unpaired' not in str(error)
    for line in offer:
        _, data = inspect(folder, **typed(line))
        number = lambda path: int(re.search(r'\d+', Path(path).name)[0])
        assert len({number(i) for i in partners(data, folder)}) == 12
        assert all(number(i) == number(m) and i != m for i, m in partners(data, folder).items())


def test_vessels_are_offered_and_not_the_fields_of_view_in_a_folder_named_mask(tmp_path):
    """HRF, with photographs, on which it depends that NumPy's bool adds as "or"."""
    folder = tmp_path / 'set'
    for n in range(12):
        save(folder / f'images/{n:02}_dr.jpg', np.random.default_rng(n).integers(0, 256, (64, 64, 3)))
        save(folder / f'manual1/{n:02}_dr.tif', np.eye(64) * 255)
        save(folder / f'mask/{n:02}_dr_mask.tif', np.eye(64) * 255)
    assert typed_lines(ask(folder)) == ['images="images" masks="manual1"']


def test_a_folder_of_masks_that_lacks_a_few_is_offered_beside_one_that_is_whole(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(12)],
         [f'{kind}/{n}.png' for kind, count in (('masks_a', 12), ('masks_b', 10)) for n in range(count)])
    assert typed_lines(ask(tmp_path / 'set')) == ['images="images" masks="masks_a"',
                                                  'images="images" masks="masks_b" skip_unpaired=True']


def test_splits_that_are_named_otherwise_pair_each_by_a_rule_of_its_own(tmp_path):
    """DRIVE: 21_training.tif and 01_test.tif, but 21_manual1.gif and 01_manual1.gif."""
    made = [('training', range(21, 27)), ('test', range(1, 7))]
    fill(tmp_path / 'set', [f'{split}/images/{n:02}_{split}.tif' for split, numbers in made for n in numbers],
         [f'{split}/1st_manual/{n:02}_manual1.gif' for split, numbers in made for n in numbers])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {
        f'{split}/images/{n:02}_{split}.tif': f'{split}/1st_manual/{n:02}_manual1.gif'
        for split, numbers in made for n in numbers}


def test_pictures_of_another_shape_are_not_offered_as_masks(tmp_path):
    """Photographs of the front and of the side of cars, all without a mask."""
    draw = np.random.default_rng(0)
    for n in range(6):
        for folder, shape in (('front', (40, 40, 3)), ('side', (40, 120, 3))):
            save(tmp_path / f'set/{folder}/car_{n}.png', draw.integers(0, 256, shape))
    assert typed_lines(ask(tmp_path / 'set')) == []


def test_a_file_is_of_the_pattern_that_says_more_of_it(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}_RGB.png' for n in range(6)], [f'images/{n}.png' for n in range(6)])
    line = 'image_pattern="{stem}_RGB.png" mask_pattern="{stem}.png"'
    assert line in typed_lines(ask(tmp_path / 'set'))
    _, data = inspect(tmp_path / 'set', **typed(line))
    assert partners(data, tmp_path / 'set') == {f'images/{n}_RGB.png': f'images/{n}.png' for n in range(6)}


def test_advice_stays_with_the_folders_that_were_typed(tmp_path):
    fill(tmp_path / 'set', [f'rgb/{n}.png' for n in range(10)] + [f'infrared/{n}.png' for n in range(12)],
         [f'masks/{n}.png' for n in range(12)])
    lines = typed_lines(ask(tmp_path / 'set', images='rgb', masks='masks'))
    assert lines == ['skip_unpaired=True']


def test_one_image_of_no_split_is_split_with_those_for_training(tmp_path):
    fill(tmp_path / 'set', [f'train/images/{n}.png' for n in range(9)] + ['images/9.png'],
         [f'train/masks/{n}.png' for n in range(9)] + ['masks/9.png'])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [8, 2, 0]


def test_predictions_are_not_offered_where_there_are_images(tmp_path):
    fill(tmp_path / 'set', [f'xrays/{n}.png' for n in range(8)] + [f'predictions/{n}.png' for n in range(12)],
         [f'masks/{n}.png' for n in range(12)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert any('images="xrays" masks="masks"' in line for line in lines) and 'predictions' not in ' '.join(lines)


def test_photographs_are_offered_no_colours_as_classes(tmp_path):
    """Nor are they taken with those that somebody typed."""
    draw = np.random.default_rng(0)
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)))
        picture = draw.integers(0, 256, (64, 64, 3))
        picture[:20] = n * 60
        save(tmp_path / f'masks/{n}.png', picture)
    assert '{\'#' not in str(ask(tmp_path))
    assert 'these are pictures, not masks' in str(ask(tmp_path, mask_values={'#000000': 0, '#3c3c3c': 1}))


def test_all_but_the_commonest_value_is_offered_as_foreground(tmp_path):
    """CrackForest: 1 is the road, and what lies around it."""
    codes = np.ones((10, 10), int)
    codes[:2], codes[2, :3] = 2, 3
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((10, 10, 3)))
        save(tmp_path / f'masks/{n}.png', codes)
    line = next(line for line in ask(tmp_path).problems if 'all but 1 is foreground' in line)
    _, data = inspect(tmp_path, **typed(line.split(' type ')[1]))
    assert data.classes[1][0] == 4 * 23


def test_evenly_spaced_values_are_classes_first(tmp_path):
    """Eyes: 128 is the disc, 255 the cup."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((10, 10, 3)))
        save(tmp_path / f'masks/{n}.png', np.repeat([0] * 7 + [128] * 2 + [255], 10).reshape(10, 10))
    assert offered(ask(tmp_path), 'mask_values=') == 'mask_values="{0: 0, 128: 1, 255: 2}"'


def test_masks_that_differ_for_one_and_the_same_image_are_told(tmp_path):
    """Two tasks on the same photographs, in folders of their own."""
    for task, top in (('cup', 3), ('disc', 6)):
        for n in range(10):
            save(tmp_path / f'set/{task}/images/{n}.png', np.eye(8, dtype=int)[..., None].repeat(3, 2) * n)
            save(tmp_path / f'set/{task}/masks/{n}.png', np.pad(np.ones((top, 8), int), ((0, 8 - top), (0, 0))))
    _, data = inspect(tmp_path / 'set')
    assert any('has mask files that differ' in note for note in data.notes)


def test_masks_of_the_same_kind_as_the_images_are_offered_first(tmp_path):
    """Each number is in every folder: normal_mask is of normal, not of abnormal."""
    kinds = [f'{split}set/{kind}' for split in ('train', 'test') for kind in ('normal', 'abnormal')]
    fill(tmp_path / 'set', [f'{kind}/{n}.png' for kind in kinds for n in range(6)],
         [f'{kind}_mask/{n}.png' for kind in kinds for n in range(6)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines
    for line in lines:
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert all(os.path.dirname(mask) == f'{os.path.dirname(image)}_mask'
                   for image, mask in partners(data, tmp_path / 'set').items())


@pytest.mark.parametrize('kind', ['images', 'masks'])
def test_pointers_of_git_lfs_are_called_so(small_set, kind):
    (small_set / kind / '003.png').write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n')
    assert f'{kind}/003.png: cannot be read: ValueError: is a pointer of Git LFS' in str(ask(small_set))


def test_masks_of_another_shape_are_not_rescaled(small_set):
    save(small_set / 'masks/003.png', np.zeros((40, 50)))
    assert 'of another shape' in str(ask(small_set, rescale_masks=True))


def test_white_of_palettes_is_foreground_beside_numbers_too(tmp_path):
    """X-rays: most masks have a palette of black and white, a few one of many shades under as many numbers."""
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)))
        codes = np.zeros((16, 16), np.uint8)
        codes[4:12, 4:12] = np.arange(64).reshape(8, 8) + 1 if number == 0 else 1
        picture = PIL.Image.fromarray(codes, 'P')
        picture.putpalette([0, 0, 0] + [255, 255 - 6 * (number == 0), 255 - 6 * (number == 0)] * 64)
        (tmp_path / 'masks').mkdir(exist_ok=True)
        picture.save(tmp_path / f'masks/{number}.png')
    assert offered(ask(tmp_path), 'mask_values=') == 'mask_values=nonzero'
    _, data = inspect(tmp_path, mask_values='nonzero')
    assert {class_id: images for class_id, (_, images) in data.classes.items()} == {0: 6, 1: 6}


def test_ones_of_8_bits_beside_white_of_16_are_asked_about(tmp_path):
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8, dtype=int) * (65535, 1)[number % 2], ('I;16', 'L')[number % 2])
    _, data = inspect(tmp_path, **typed(offered(ask(tmp_path), 'mask_values=')))
    assert data.coding.num_classes == 2 and data.classes[1][1] == 12


def test_six_classes_of_which_higher_numbers_are_rarer_are_no_ids(tmp_path):
    """Cars: ids would begin with 1 in each mask, and leave none out."""
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        parts = [1, 2, 3] if number < 6 else [1, 2, 4, 5] if number < 10 else [1, 2, 4, 6]
        save(tmp_path / f'masks/{number}.png', np.pad(np.repeat(parts, 8).reshape(-1, 8), ((0, 8 - len(parts)), (0, 0))))
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 7 and not any('ids of objects' in note for note in data.notes)


def test_an_orientation_of_0_turns_nothing(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.jpg' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    exif = PIL.Image.Exif()
    exif[274] = 0
    PIL.Image.new('RGB', (8, 8)).save(tmp_path / 'set/images/0.jpg', exif=exif)
    assert not any('EXIF' in mode for mode in inspect(tmp_path / 'set')[1].modes)


def test_folders_inside_the_typed_one_are_named_beside_it(tmp_path):
    fill(tmp_path / 'set', [f'pictures/{kind}{n}.png' for kind in ('', 'imgs_of_etis/') for n in range(4)],
         [f'masks/{n}.png' for n in range(4)])
    assert 'the folder itself, imgs_of_etis' in str(ask(tmp_path / 'set', images='pictures', masks='masks'))


def test_large_files_are_not_decoded_for_a_guess(tmp_path, monkeypatch):
    """Each would take gigabytes, and the time in which the other lines are tried."""
    kinds = 'images', 'masks_a', 'masks_b'
    fill(tmp_path / 'set', [], [f'{kind}/{n}.png' for kind in kinds for n in range(4)])
    monkeypatch.setattr(train_unet, 'read_header', lambda *_: (5000, 5000, 'L'))
    monkeypatch.setattr(train_unet, 'read_mask', None)
    assert typed_lines(ask(tmp_path / 'set')) == ['images="images" masks="masks_a"', 'images="images" masks="masks_b"']


def test_names_of_splits_in_two_letters(tmp_path):
    """DIS5K: DIS-TR, DIS-VD and DIS-TE1; but TCGA_TS_1 is a patient."""
    for folder in ('DIS-TR', 'DIS-VD', 'DIS-TE1', 'DIS-TE2'):
        fill(tmp_path / 'set', [f'{folder}/im/{folder}{n}.jpg' for n in range(3)],
             [f'{folder}/gt/{folder}{n}.png' for n in range(3)])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [3, 3, 6]
    assert train_unet.read_place('TCGA_TS_1')[0] == ''


def test_views_are_not_paired_with_the_masks_of_others(tmp_path):
    """images-0 belongs to mask-0, though the stems are the same."""
    fill(tmp_path / 'set', [f'{n:02}/images-{view}/{n}.png' for n in range(8) for view in (0, 1)],
         [f'{n:02}/mask-{view}/{n}.png' for n in range(8) for view in (0, 1)])
    _, data = inspect(tmp_path / 'set')
    pairs = partners(data, tmp_path / 'set')
    assert len(pairs) == 16 and all(image.replace('images', 'mask') == mask for image, mask in pairs.items())


def test_the_first_of_several_kinds_of_masks_is_not_offered_for_all(tmp_path):
    """skip_unpaired alone would take the colours, which come first in the alphabet."""
    fill(tmp_path / 'set', [f'rgb/cam0_rgb_{n:04}.png' for n in range(12)],
         [f'gt/cam0_gt_{kind}_{n:04}.png' for kind in ('color', 'labels') for n in range(12)])
    assert typed_lines(ask(tmp_path / 'set')) == []


def test_a_folder_for_each_image_named_like_one_gets_its_line(tmp_path):
    """As labelme_json_to_dataset writes them."""
    for n in range(6):
        fill(tmp_path / 'set', [f'img_{n}_json/img.png'], [f'img_{n}_json/label.png', f'img_{n}_json/label_viz.png'])
    line = 'image_pattern="{stem}img.png" mask_pattern="{stem}label.png"'
    assert line in typed_lines(ask(tmp_path / 'set'))
    _, data = inspect(tmp_path / 'set', image_pattern='{stem}img.png', mask_pattern='{stem}label.png')
    assert partners(data, tmp_path / 'set') == {f'img_{n}_json/img.png': f'img_{n}_json/label.png' for n in range(6)}


def test_a_few_masks_of_many_images_may_be_all_that_is_meant(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(60)], [f'masks/{n}.png' for n in range(2)])
    assert 'skip_unpaired=True' in typed_lines(ask(tmp_path / 'set'))


def test_kinds_of_masks_that_are_united_are_named(tmp_path):
    for n in range(4):
        fill(tmp_path / 'set', [f'id{n}/images/id{n}.png'], [f'id{n}/masks/{kind}.png' for kind in ('cup', 'disc')])
    _, data = inspect(tmp_path / 'set')
    assert data.pairs.rule == 'one folder per image, its masks united, such as cup and disc'
    _, data = inspect(tmp_path / 'set', mask_pattern='{stem}cup.png')
    assert partners(data, tmp_path / 'set') == {f'id{n}/images/id{n}.png': f'id{n}/masks/cup.png' for n in range(4)}


@pytest.mark.parametrize('extra', ['mask_color', 'overlay', 'viz'])
def test_pictures_made_of_masks_are_not_united_with_them(tmp_path, extra):
    for n in range(6):
        fill(tmp_path / 'set', [f'id{n}/images/id{n}.png'], [f'id{n}/masks/{kind}.png' for kind in ('mask', extra)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines
    for line in lines:
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert partners(data, tmp_path / 'set') == {f'id{n}/images/id{n}.png': f'id{n}/masks/mask.png' for n in range(6)}


def test_one_folder_of_masks_in_each_split_is_no_choice(tmp_path):
    """ISIC 2017: the folders of the test split alone are called v2."""
    for number, (split, version) in enumerate([('Training', ''), ('Validation', ''), ('Test', '_v2')]):
        stems = [f'ISIC_{number * 4 + n:07}' for n in range(4)]
        fill(tmp_path / 'set', [f'ISIC-2017_{split}{version}_Data/{stem}.jpg' for stem in stems],
             [f'ISIC-2017_{split}{version}_Part1_GroundTruth/{stem}_segmentation.png' for stem in stems])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [4, 4, 4]


def test_images_left_over_are_offered_to_be_skipped(tmp_path):
    """VOC: many more images than masks, and masks of two kinds."""
    fill(tmp_path / 'voc', [f'JPEGImages/{n}.jpg' for n in range(9)],
         [f'{kind}/{n}.png' for n in range(4) for kind in ('SegmentationClass', 'SegmentationObject')])
    assert typed_lines(ask(tmp_path / 'voc')) == [f'images="JPEGImages" masks="Segmentation{kind}" skip_unpaired=True'
                                                  for kind in ('Class', 'Object')]


def test_test_images_without_masks_are_left_out_and_told(tmp_path):
    """A contest keeps the masks of its test images; those in the other splits are never dropped so."""
    for kind, side in (('images', 0), ('masks', 1)):
        fill(tmp_path / 'set', *[[f'{s}/{kind}/{s}{n}.png' for s in ('train', 'test')[:2 - side] for n in range(3)]
                                 if k == side else [] for k in (0, 1)])
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.images) == 3
    assert data.notes == ['ignored 3 files, images of the test split, which has no masks: test0.png, ...']
    fill(tmp_path / 'set', [f'val/images/v{n}.png' for n in range(3)], [])
    assert 'image without a mask' in str(ask(tmp_path / 'set'))


def test_stars_in_folders_keep_split_and_patient(tmp_path):
    """What * stands for may be a split or tell files of one name apart."""
    names = [f'{s}/p{n}' for n, s in enumerate(['train', 'val', 'train', 'val'])]
    fill(tmp_path / 'set', [f'{n}/scan/1.png' for n in names], [f'{n}/drawn/1.png' for n in names])
    _, data = inspect(tmp_path / 'set', images='*/p*/scan', masks='*/p*/drawn')
    assert partners(data, tmp_path / 'set') == {f'{n}/scan/1.png': f'{n}/drawn/1.png' for n in names}
    assert len(data.pairs.rows('val')) == 2


def test_one_folder_named_images_holds_both(tmp_path):
    """Magnetic tiles: MT_Crack/Imgs/x.jpg and its mask MT_Crack/Imgs/x.png."""
    fill(tmp_path / 'set', [f'MT_{k}/Imgs/{k}{n}.jpg' for k in 'ab' for n in range(3)],
         [f'MT_{k}/Imgs/{k}{n}.png' for k in 'ab' for n in range(3)])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {f'MT_{k}/Imgs/{k}{n}.jpg': f'MT_{k}/Imgs/{k}{n}.png'
                                                for k in 'ab' for n in range(3)}


def test_matrix_beside_its_photograph_is_no_image(tmp_path):
    """Oxford pets has images/Abyssinian_100.mat beside images/Abyssinian_100.jpg."""
    fill(tmp_path / 'set', [f'images/{n}.jpg' for n in range(3)], [f'masks/{n}.png' for n in range(3)])
    (tmp_path / 'set/images/2.mat').write_bytes(b'MATLAB 5.0')
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.images) == 3 and 'ignored 2.mat' in data.notes


@pytest.mark.parametrize('split_side, flat_side', [('images', 'masks'), ('masks', 'images')])
def test_folders_of_splits_on_one_side_only(tmp_path, split_side, flat_side):
    """The other side is one flat folder; the split holds for the pairs."""
    folder = tmp_path / 'set'
    split = {n: ('train', 'val', 'test')[n % 3] for n in range(9)}
    names = {split_side: [f'{split_side}/{s}/{n}.png' for n, s in split.items()],
             flat_side: [f'{flat_side}/{n}.png' for n in split]}
    fill(folder, names['images'], names['masks'])
    _, data = inspect(folder)
    assert partners(data, folder) == dict(zip(names['images'], names['masks']))
    for s in train_unet.SPLITS:
        assert names_of(data, s) == {str(n) for n in split if split[n] == s}


def test_files_of_the_desktop_are_named_in_the_notes(small_set):
    """In the top folder or beside the images."""
    (small_set / '.DS_Store').write_bytes(b'\0\0\0\1Bud1')
    _, data = inspect(small_set)
    assert data.notes == ['ignored .DS_Store']


def test_image_that_is_listed_twice_is_refused(small_set):
    """Even under another spelling: it could be learned from and validated on."""
    names = [f'{n:03d}.png' for n in range(12)]
    rows = [(f'images/{name}', f'masks/{name}') for name in names]
    with open(small_set / 'list.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('image', 'mask'), *rows, ('images/../images/003.png', 'masks/003.png')])
    error = ask(small_set / 'list.csv')
    assert error.problems == [f'{small_set}/list.csv: {small_set}/images/003.png is listed 2 times']


# --- groups --------------------------------------------------------------------------


def test_group_pattern_that_is_not_found_is_refused(small_set):
    """A name without a group would be a group of its own, and nobody would know."""
    (small_set / 'images/007.png').rename(small_set / 'images/p7.png')
    (small_set / 'masks/007.png').rename(small_set / 'masks/p7.png')
    error = ask(small_set, group_pattern=r'^(\d\d)')
    assert f"group_pattern='^(\\\\d\\\\d)' is not found in {small_set}/images/p7.png" in str(error)
    inspect(small_set, group_pattern=r'(\d)')


def test_group_pattern_may_match_the_folder(tmp_path):
    """A folder per patient, with the same names in each."""
    names = [f'p{p}/{n:03d}.png' for p in range(1, 6) for n in range(1, 5)]
    fill(tmp_path / 'set', [f'images/{n}' for n in names], [f'masks/{n}' for n in names])
    sides = set()
    for seed in range(5):
        _, data = inspect(tmp_path / 'set', group_pattern=r'^(p\d+)/', seed=seed)
        train, val = ({Path(os.fsdecode(data.pairs.images[row])).parent.name for row in data.pairs.rows(s)}
                      for s in ('train', 'val'))
        assert len(val) == 1 and len(train) == 4 and not train & val
        sides |= val
    assert len(sides) > 1


# --- what the values mean ------------------------------------------------------------


def test_masks_of_two_habits_are_asked_for(tmp_path):
    """Some hold 0 and 1, others 0 and 255: foreground there, or ignored?"""
    folder = tmp_path / 'set'
    for n in range(6):
        save(folder / f'images/{n}.png', np.zeros((8, 8, 3)))
        save(folder / f'masks/{n}.png', np.eye(8) * (255 if n % 3 == 0 else 1))
    error = ask(folder)
    assert '4 masks hold 0 and 1, 2 others 0 and 255' in str(error)
    lines = [shlex.split(line.split(' type ')[1]) for line in error.problems if ' type ' in line]
    assert len(lines) == 2
    meant = []
    for line in lines:
        config, data = inspect(folder, **typed_words(line))
        assert data.coding.num_classes == 2
        assert (mask_of(data, config, '1') == np.eye(8)).all()
        meant.append(sorted(set(mask_of(data, config, '0').ravel().tolist())))
    assert meant == [[0, 1], [0, 255]]


@pytest.mark.parametrize('split', [False, True])
def test_set_without_foreground_is_refused(tmp_path, split):
    """Also where only the validation masks have some: the counts are those of training."""
    for n in range(4):
        place = f'{("train", "val")[n % 2]}/{n}.png' if split else f'{n}.png'
        save(tmp_path / f'set/images/{place}', np.zeros((8, 8, 3)))
        save(tmp_path / f'set/masks/{place}', np.eye(8) * 255 * (split and n % 2))
    with pytest.raises(DataError, match='every pixel of the training masks is of one class'):
        dataset(tmp_path / 'set')
    inspect(tmp_path / 'set')                                          # evaluate may score it


def test_palettes_that_differ_are_told(tmp_path):
    """Index 1 red here, green there: what is it?"""
    folder = draw_set(tmp_path / 'set', count=4, size=16)
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        mask = PIL.Image.fromarray((np.array(PIL.Image.open(path)) > 0).astype(np.uint8), 'P')
        mask.putpalette([0, 0, 0, *([255, 0, 0] if n else [0, 255, 0])])
        mask.save(path)
    _, data = inspect(folder)
    assert [note for note in data.notes if 'palette masks differ: 1 is #ff0000 in 3, #00ff00 in 1 masks' in note]
    mask.putpalette([0, 0, 0, 255, 0, 0])
    mask.save(sorted((folder / 'masks').iterdir())[0])
    assert not inspect(folder)[1].notes


def test_16_bit_foreground_is_understood(tmp_path):
    """0 and 65535: the masks of TGS Salt."""
    folder, _ = coded_set(tmp_path / 'set', [0, 65535], kind='I;16')
    assert inspect(folder)[1].coding.table.items() >= {(0, 0), (65535, 1)}


def test_ignored_pixels_alone_are_no_foreground_of_many_classes(tmp_path):
    """A set of one's own for evaluate may hold only background and void."""
    folder, place = coded_set(tmp_path / 'set', [0, 255])
    config, data = inspect(folder, num_classes=11)
    assert set(np.unique(mask_of(data, config, '1'))) == {0, 255}


@pytest.mark.parametrize('suffix', ['.npy', '.tif'])
def test_pixels_of_images_are_left_alone_by_the_first_look(tmp_path, monkeypatch, suffix):
    """Only headers: a folder of large scans starts quickly."""
    folder = tmp_path / 'set'
    for n in range(4):
        save(folder / f'masks/{n}.png', np.eye(8))
        (folder / 'images').mkdir(exist_ok=True)
        image = np.full((8, 8, 5), n, np.uint16)
        np.save(folder / f'images/{n}.npy', image) if suffix == '.npy' else \
            tifffile.imwrite(folder / f'images/{n}.tif', image, photometric='minisblack', planarconfig='contig')
    read = []
    opened = train_unet.read_array
    monkeypatch.setattr(train_unet, 'read_array',
                        lambda path, *rest, **how: read.append(path) or opened(path, *rest, **how))
    _, data = inspect(folder, in_channels=5)
    assert data.modes == {'uint16 x 5 image, L mask': 4} and data.sizes == {(8, 8): 4}
    assert read and all('/masks/' in path for path in read)


def test_a_hundred_classes_are_offered_as_classes(tmp_path):
    """0 to 99 without a gap, so many that they could be objects: the user is asked."""
    folder, place = coded_set(tmp_path / 'set', [*range(100)])
    line = offered(ask(folder), 'num_classes=')
    assert line == 'num_classes=100'
    config, data = inspect(folder, **typed(line))
    assert data.coding.num_classes == 100
    assert (mask_of(data, config, '1') == place).all()


def test_colours_with_noise_are_offered_a_threshold(tmp_path):
    """Red on black, saved as RGB JPEG: hundreds of colours, of which the bright ones are meant."""
    folder, exact = draw_set(tmp_path / 'set', count=4), {}
    for path in sorted((folder / 'masks').iterdir()):
        mask = np.array(PIL.Image.open(path)) > 0
        exact[path.stem] = mask
        colours = np.where(mask[..., None], [250, 60, 40], [5, 5, 5]).astype(np.uint8)
        PIL.Image.fromarray(colours).save(path.with_suffix('.jpg'), quality=60)
        path.unlink()
    error = ask(folder)
    line = offered(error, 'mask_values=">')
    assert line == 'mask_values=">127"'
    config, data = inspect(folder, **typed(line))
    for stem, mask in exact.items():
        assert (mask_of(data, config, stem) == mask).mean() > 0.95


# --- the command and what cannot be read ---------------------------------------------


@pytest.mark.parametrize('names, status', [("['a','b','c']", 2), ("['a']", 2), ("['a','b']", 0)])
def test_names_must_be_as_many_as_the_classes_found(small_set, capsys, names, status):
    """num_classes is still auto, so only a look at the masks tells."""
    assert train_unet.main(['check', f'data={small_set}', f'class_names={names}', *WORDS]) == status
    if status:
        told = capsys.readouterr().err
        assert 'the config cannot be used' in told and 'there are 2 classes' in told


def cut(path, share=0.6):
    """The beginning of a file, as a download that broke off leaves it."""
    path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_check_leaves_out_a_broken_image_if_asked(small_set, monkeypatch, capsys, caplog, suffix):
    """Its header is sound, only its pixels break off."""
    no_waiting(monkeypatch)
    old, path = small_set / 'images/005.png', small_set / f'images/005{suffix}'
    picture = PIL.Image.open(old)
    picture.load()
    old.unlink()
    picture.save(path)
    cut(path)
    words = ['check', f'data={small_set}', *WORDS]
    assert train_unet.main(words) == 2
    told = capsys.readouterr().err
    assert str(path) in told and 'skip_broken=True' in told and '1 of 12 images' in told
    caplog.clear()
    assert train_unet.main([*words, 'skip_broken=True']) == 0
    told = capsys.readouterr()
    assert str(path) in caplog.text + told.out + told.err


@pytest.mark.parametrize('place', ['images', 'masks/deep', ''])
def test_folder_that_may_not_be_entered_is_told(small_set, monkeypatch, capsys, place):
    """One line, no traceback. Root may enter all, so the refusal is played."""
    (small_set / 'masks/deep').mkdir()
    closed, scandir = small_set / place, os.scandir

    def refuse(path='.'):
        if Path(os.fsdecode(path)) == closed:
            raise PermissionError(13, 'Permission denied', os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', refuse)
    assert f'{closed}: cannot be read: Permission denied' in str(ask(small_set))
    assert train_unet.main(['check', f'data={small_set}', *WORDS]) == 2
    assert 'Permission denied' in capsys.readouterr().err


def test_a_cut_image_is_left_out_by_the_line_that_a_training_prints(small_set, capsys):
    path = sorted((small_set / 'images').iterdir())[0]
    path.write_bytes(path.read_bytes()[:-60])                          # its header is sound
    assert train_unet.main([f'data={small_set}', *WORDS]) == 2
    assert 'skip_broken=True leaves out files that cannot be read' in capsys.readouterr().err


@pytest.mark.parametrize('run_dir', ['file', 'file/run', 'file/deeper/run'])
def test_check_is_not_ready_where_a_run_cannot_be_written(small_set, tmp_path, monkeypatch, capsys, run_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').write_text('')
    for command in (['check'], []):
        assert train_unet.main([*command, f'data={small_set}', f'run_dir={run_dir}', *WORDS]) == 2
        assert 'cannot be written' in capsys.readouterr().err
    assert not (tmp_path / 'runs').exists()


def test_name_that_no_folder_can_have_is_told():
    """The system refuses 300 letters before it looks."""
    assert 'n' * 300 in str(ask('n' * 300))


def test_one_unreadable_image_among_a_thousand_is_named(tmp_path):
    """Rows are handed to the readers in chunks; none is lost."""
    folder = tmp_path / 'set'
    fill(folder, ['images/0000.png'], ['masks/0000.png'])
    for n in range(1, 1000):
        for kind in ('images', 'masks'):
            os.link(folder / f'{kind}/0000.png', folder / f'{kind}/{n:04d}.png')
    broken = folder / 'images/0777.png'
    broken.unlink()
    broken.write_text('hello')
    error = ask(folder)
    assert error.title == '1 of 1000 images or masks cannot be used'
    assert str(broken) in error.problems[0] and len(error.problems) == 2
    _, data = inspect(folder, skip_broken=True)
    assert len(data.pairs.images) == 999 and '0777' not in names_of(data, 'train') | names_of(data, 'val')


@pytest.mark.parametrize('names, chosen', [
    ([f'{side}/{n}.png' for side in ('A', 'B') for n in range(4)], 'images="A" masks="B"'),
    ([f'{n}R{tail}' for n in range(4) for tail in ('.jpg', '_1stHO.png', '_2ndHO.png')],
     'image_pattern="{stem}.jpg" mask_pattern="{stem}_1stHO.png"')])
def test_where_no_name_tells_a_line_to_type_is_offered_and_works(tmp_path, names, chosen):
    for name in names:
        (tmp_path / 'set' / name).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(tmp_path / 'set' / name)
    with pytest.raises(train_unet.DataError) as caught:
        train_unet.find_pairs({**train_unet.CONFIG, 'data': str(tmp_path / 'set')})
    assert any(chosen in line for line in caught.value.problems)
    typed, _ = train_unet.parse_overrides(shlex.split(chosen))
    assert len(train_unet.find_pairs({**train_unet.CONFIG, 'data': str(tmp_path / 'set'), **typed}).images) == 4


# --- found by reading the issue against the code --------------------------------------


@pytest.mark.parametrize('kind', ['P', None], ids=['palette', 'grey'])
def test_object_ids_are_no_classes_though_one_mask_lacks_an_id(tmp_path, kind):
    """An object that was removed, or a palette, does not make classes of them."""
    folder = tmp_path / 'set'
    for n in range(12):
        save(folder / f'images/{n}.png', np.zeros((16, 16, 3)))
        ids = [0, 2, 3] if n == 5 else [*range(n % 6 + 2)]
        save(folder / f'masks/{n}.png', np.resize(ids, 16)[:, None].repeat(16, 1), kind)
    error = ask(folder)
    assert error.title == 'the mask values are not clear' and 'mask_values=nonzero' in str(error)
    assert inspect(folder, mask_values='nonzero')[1].coding.num_classes == 2


@pytest.mark.parametrize('names', [
    ('Dataset_BUSI_with_GT/benign/b ({n}).png', 'Dataset_BUSI_with_GT/benign/b ({n})_mask.png'),
    ('segmentation/images/{n}.png', 'segmentation/masks/{n}.png'),
    ('raw images/train/images/{n}.jpg', 'raw images/train/gt/{n}.png'),
    ('lgg-segmentation/kaggle_3m/p{n}/p{n}_1.tif', 'lgg-segmentation/kaggle_3m/p{n}/p{n}_1_mask.tif')])
def test_a_folder_around_everything_tells_nothing(tmp_path, names):
    """The archive's own name may hold a word such as GT."""
    expected = {names[0].format(n=n): names[1].format(n=n) for n in range(4)}
    fill(tmp_path / 'set', expected, expected.values())
    assert partners(inspect(tmp_path / 'set')[1], tmp_path / 'set') == expected


def test_drive_as_it_is_given_out_is_offered_with_its_masks(tmp_path):
    """Vessels were drawn for training only, the field of view for both: the line for the vessels is there too."""
    names = {'training': range(21, 41), 'test': range(1, 21)}
    for split, numbers in names.items():
        word = split.removesuffix('ing') if split == 'test' else split
        fill(tmp_path / 'set', [f'{split}/images/{n:02}_{word}.tif' for n in numbers],
             [f'{split}/mask/{n:02}_{word}_mask.gif' for n in numbers]
             + [f'{split}/1st_manual/{n:02}_manual1.gif' for n in numbers if split == 'training'])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert 'images="*/images" masks="*/1st_manual"' in lines
    _, data = inspect(tmp_path / 'set', **typed('images="*/images" masks="*/1st_manual"'))
    masks = partners(data, tmp_path / 'set').values()
    assert len(masks) == 20 and all('1st_manual' in mask for mask in masks)


INVERTED = [('grey', [0, 255], None), ('0 and 1, 255 ignored', [0, 1, 255], None), ('RGB', [0, 255], 'RGB'),
            ('16 bits', [0, 65535], 'I;16'), ('JPEG', [0, 255], 'JPEG')]


@pytest.mark.parametrize('values, kind', [row[1:] for row in INVERTED], ids=[row[0] for row in INVERTED])
def test_the_line_for_inverted_masks_turns_them(tmp_path, values, kind):
    """What is offered can be typed, and makes the rare part the foreground."""
    rng = np.random.default_rng(0)
    for n in range(4):
        save(tmp_path / f'set/images/{n}.png', rng.integers(0, 255, (64, 64, 3)))
        mask = np.full((64, 64), values[1])
        mask[np.hypot(*(np.mgrid[:64, :64] - 8)) < 5 + n] = values[0]
        mask[60:, :4] = values[-1] if len(values) > 2 else mask[60:, :4]
        mask = mask if kind != 'RGB' else np.stack([mask] * 3, -1)
        save(tmp_path / f'set/masks/{n}.png', mask, 'I;16' if kind == 'I;16' else None)
        if kind == 'JPEG':
            PIL.Image.fromarray(mask.astype(np.uint8)).save(tmp_path / f'set/masks/{n}.jpg', quality=60)
            (tmp_path / f'set/masks/{n}.png').unlink()
    _, data = inspect(tmp_path / 'set')
    note, = (note for note in data.notes if 'inverted' in note)
    config, turned = inspect(tmp_path / 'set', **typed(note.split(' type ')[1]))
    assert turned.shares[1] < 0.06 and not [note for note in turned.notes if 'inverted' in note]
    ids = mask_of(turned, config, '0')
    assert (ids[6:10, 6:10] == 1).all() and (ids[20:50, 20:50] == 0).all()
    if len(values) > 2:
        assert (ids[60:, :4] == 255).all()


def test_class_numbers_that_begin_with_1_are_taken_if_their_count_is_typed(tmp_path):
    """Oxford pets: 1, 2, 3. The line that is printed must not lead back to itself."""
    folder, place = coded_set(tmp_path / 'set', [1, 2, 3])
    line = offered(ask(folder), 'num_classes=')
    config, data = inspect(folder, **typed(line))
    assert (mask_of(data, config, '1') == place + 1).all()


def test_three_levels_with_noise_are_not_taken_for_two(tmp_path):
    """Optic disc and cup as JPEG: 0, 128 and 255."""
    folder = draw_set(tmp_path / 'set', count=4, size=64)
    for path in sorted((folder / 'masks').iterdir()):
        mask = np.zeros((64, 64), np.uint8)
        mask[10:26, 10:26], mask[12:16, 12:16] = 128, 255
        PIL.Image.fromarray(mask).save(path.with_suffix('.jpg'), quality=70)
        path.unlink()
    assert 'mask_values=">127"' in str(ask(folder))


def test_16_bits_with_and_without_negative_values_have_one_scale(tmp_path):
    """Slices of a scan: whether one holds a negative value must not change how bright it is."""
    for name, low in (('a', 0), ('b', -5)):
        image = np.full((8, 8), 1000, np.int16)
        image[0, 0] = low
        tifffile.imwrite(tmp_path / f'{name}.tif', image)
    a, b = (train_unet.read_image(str(tmp_path / f'{n}.tif'), {**train_unet.CONFIG, 'in_channels': 1}) for n in 'ab')
    assert a[1, 1] == b[1, 1] == 1000


@pytest.mark.parametrize('dtype, channels', [(np.uint8, 4), (np.uint16, 4), (np.uint16, 3)])
def test_bands_beyond_red_green_blue_are_kept_at_their_depth(tmp_path, dtype, channels):
    """NAIP: red, green, blue and near infrared; Pillow would drop the fourth, or cut 16 bits to 8."""
    values = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (6, 5, channels)).astype(dtype)
    extra = {'extrasamples': ['unspecified']} if channels == 4 else {}
    tifffile.imwrite(tmp_path / 'x.tif', values, photometric='rgb', **extra)
    image = train_unet.read_image(str(tmp_path / 'x.tif'), {**train_unet.CONFIG, 'in_channels': channels})
    assert image == pytest.approx(values / (65535 if dtype == np.uint16 else 1), abs=1e-4)


def test_arrays_with_bands_first_are_told_what_to_type(tmp_path):
    for n in range(4):
        save(tmp_path / f'set/masks/{n}.png', np.eye(16))
        (tmp_path / 'set/images').mkdir(exist_ok=True)
        np.save(tmp_path / f'set/images/{n}.npy', np.zeros((4, 16, 16), np.float32))
    assert 'if its bands come first type in_channels=4' in str(ask(tmp_path / 'set'))
    assert inspect(tmp_path / 'set', in_channels=4)[1].sizes == {(16, 16): 4}


def test_black_and_white_palettes_mean_what_they_show(tmp_path):
    """In some files index 0 is the white one."""
    folder = tmp_path / 'set'
    for n in range(4):
        save(folder / f'images/{n}.png', np.zeros((8, 8, 3)))
        shown = np.eye(8, dtype=np.uint8)
        mask = PIL.Image.fromarray(1 - shown if n % 2 else shown, 'P')
        mask.putpalette([255] * 3 + [0] * 3 if n % 2 else [0] * 3 + [255] * 3)
        (folder / 'masks').mkdir(exist_ok=True)
        mask.save(folder / f'masks/{n}.png')
    config, data = inspect(folder)
    for n in range(4):
        assert (mask_of(data, config, str(n)) == np.eye(8)).all()


def test_runs_below_the_data_are_no_data(tmp_path, monkeypatch, capsys):
    """cd into the data, check, train: the pictures that check wrote are not images of the set."""
    fill(tmp_path, [f'{n}.jpg' for n in range(6)], [f'{n}_mask.png' for n in range(6)])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train_unet.main(['check', 'data=.', *WORDS]) == 0
    assert (tmp_path / 'runs/check/samples.png').exists()


@pytest.mark.parametrize('splits, told', [(('train', 'val', 'spare'), 'trained on'),
                                          (('train', 'extra'), 'by chance')])
def test_folders_that_name_no_split_beside_those_that_do_are_told(tmp_path, splits, told):
    fill(tmp_path / 'set', *[[f'{s}/{kind}/{s}{n}.png' for s in splits for n in range(3)]
                             for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    note, = data.notes
    assert f'3 images, such as {tmp_path}/set/{splits[-1]}/' in note and note.endswith(told)


def test_one_image_of_no_split_beside_train_and_val_is_trained_on(small_set):
    names = sorted(path.stem for path in (small_set / 'images').iterdir())
    pairs = [[next((small_set / kind).glob(f'{name}.*')) for kind in ('images', 'masks')] for name in names[:4]]
    lines = [f'{image},{mask},{split}' for (image, mask), split in zip(pairs, ('train', 'val', 'val', ''))]
    (small_set / 'list.csv').write_text('\n'.join(['image,mask,split', *lines]))
    _, data = inspect(small_set / 'list.csv')
    assert [names_of(data, split) for split in ('train', 'val')] == [{names[0], names[3]}, {names[1], names[2]}]


def test_a_list_that_gives_one_mask_to_several_images_is_told_of(small_set):
    images, masks = (sorted((small_set / kind).iterdir()) for kind in ('images', 'masks'))
    (small_set / 'list.csv').write_text('\n'.join(['image,mask', *(f'{image},{masks[0]}' for image in images)]))
    _, data = inspect(small_set / 'list.csv')
    assert f'{len(images)} images have one and the same mask: {masks[0]}' in data.notes


@pytest.mark.parametrize('kind, suffix', [('images', '.gif'), ('masks', '.gif'), ('masks', '.png'),
                                          ('images', '.webp')])
def test_a_film_is_refused_not_read_by_its_first_picture(small_set, kind, suffix):
    path = sorted((small_set / kind).iterdir())[0]
    first, *others = (PIL.Image.fromarray(np.roll(np.array(PIL.Image.open(path)), n, 0)) for n in range(3))
    path.unlink()
    first.save(path.with_suffix(suffix), save_all=True, append_images=others)
    assert f'{path.stem}{suffix}: cannot be read: ValueError: holds 3 pictures' in str(ask(small_set))


def test_a_photograph_of_a_phone_that_carries_a_preview_is_no_film(small_set):
    """Its JPEG holds a second picture (MPO)."""
    path = small_set / 'images' / '003.png'
    picture = PIL.Image.open(path)
    picture.save(path.with_suffix('.jpg'), 'MPO', save_all=True, append_images=[picture.resize((8, 8))])
    path.unlink()
    assert len(inspect(small_set)[1].pairs.images) == 12


def test_a_large_group_is_not_drawn_whole_for_validation(tmp_path):
    """Two patients with 18 and 2 slices at a fifth: the small one is validated on, whatever the seed."""
    names = [f'a_{n}' for n in range(18)] + [f'b_{n}' for n in range(2)]
    fill(tmp_path / 'set', [f'images/{n}.png' for n in names], [f'masks/{n}.png' for n in names])
    for seed in range(5):
        assert names_of(inspect(tmp_path / 'set', group_pattern='^[ab]', seed=seed)[1], 'val') == {'b_0', 'b_1'}


def test_check_names_every_file_that_has_no_partner(tmp_path, capsys):
    """Training names ten and counts the others."""
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(30)], [f'masks/{n}.png' for n in range(5)])
    assert train_unet.main(['check', f'data={tmp_path}/set', *WORDS]) == 2
    assert capsys.readouterr().err.count('image without a mask') == 25
    assert train_unet.main([f'data={tmp_path}/set', *WORDS]) == 2
    told = capsys.readouterr().err
    assert told.count('image without a mask') == 10 and '... and 15 more' in told


@pytest.mark.parametrize('meant, quality', [((0, 60, 120, 180), 75), ((0, 50, 100, 150, 200), 97), ((0, 128, 255), 50),
                                            ((0, 90, 180), None)])
def test_noise_around_greys_goes_to_the_nearest(tmp_path, meant, quality):
    """Classes in grey, saved as JPEG or with soft edges: a line for the classes, not for each value of the noise."""
    folder, exact = draw_set(tmp_path / 'set', count=4, size=96), {}
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        mask = np.zeros((96, 96), np.uint8)
        for number, value in enumerate(meant[1:]):
            cv2.circle(mask, (20 + 22 * number, 40 + n), 10 + number, value, -1)
        exact[path.stem] = np.searchsorted(meant, mask)
        if quality is None:
            cv2.imwrite(str(path), cv2.GaussianBlur(mask, (5, 5), 0))
        else:
            path.unlink()
            cv2.imwrite(str(path.with_suffix('.jpg')), mask, [cv2.IMWRITE_JPEG_QUALITY, quality])
    line = offered(ask(folder), 'mask_values="{0')
    assert [*typed(line)['mask_values']] == [*meant]
    config, data = inspect(folder, **typed(line))
    assert data.coding.num_classes == len(meant) and 'noise around' in data.coding.words
    assert all((mask_of(data, config, stem) == mask).mean() > 0.95 for stem, mask in exact.items())


def test_ids_of_objects_are_not_taken_for_noise(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        ids = np.kron(np.arange(100).reshape(10, 10), np.ones((6, 6)))
        save(path, ids)
        save(folder / f'images/{path.name}', np.zeros((60, 60, 3)))
    assert 'noise around' not in str(ask(folder))
    assert 'does not name' in str(ask(folder, mask_values={0: 0, 1: 1}))


def test_noise_around_colours_goes_to_the_nearest(tmp_path):
    """Three classes in colour, saved as JPEG: thousands of colours, of which three are meant."""
    meant, exact = np.array([[0, 0, 0], [220, 40, 40], [40, 200, 60]], np.uint8), {}
    for n, path in enumerate(sorted((draw_set(tmp_path / 'set', count=4, size=64) / 'masks').iterdir())):
        mask = np.zeros((64, 64), int)
        mask[8:40, 4 + n:30], mask[30:60, 34:60] = 1, 2
        exact[path.stem] = mask
        PIL.Image.fromarray(meant[mask]).save(path.with_suffix('.jpg'), quality=75)
        path.unlink()
    line = offered(ask(tmp_path / 'set'), "mask_values=\"{'#")
    config, data = inspect(tmp_path / 'set', **typed(line))
    assert data.coding.num_classes == 3 and 'noise around these' in data.coding.words
    found = {stem: mask_of(data, config, stem) for stem in exact}
    order = [int(np.bincount(found['000'][exact['000'] == k]).argmax()) for k in range(3)]
    assert sorted(order) == [0, 1, 2]
    for stem, mask in exact.items():
        assert (found[stem] == np.array(order)[mask]).mean() > 0.97


def test_photographs_are_never_offered_as_masks_of_each_other(tmp_path):
    """A folder of photographs alone, whose names differ in a digit."""
    fill(tmp_path / 'set', [f'train/p{n:03}.jpg' for n in range(30)], [])
    assert not typed_lines(ask(tmp_path / 'set'))


@pytest.mark.parametrize('split', [('TR', 'TE'), ('train', 'test')])
def test_images_of_training_are_never_offered_with_masks_of_the_test(tmp_path, split):
    """DUTS: DUTS-TR/DUTS-TR-Image, DUTS-TE/DUTS-TE-Mask; the same names in both."""
    for s in split:
        fill(tmp_path / 'set', [f'{s}/{s}-photo/{n}.jpg' for n in range(9)],
             [f'{s}/{s}-{kind}/{n}.png' for n in range(9) for kind in ('truth', 'edges')])
    with contextlib.suppress(DataError):
        inspect(tmp_path / 'set')
        return
    for line in typed_lines(ask(tmp_path / 'set')):
        for image, mask in partners(inspect(tmp_path / 'set', **typed(line))[1], tmp_path / 'set').items():
            assert image.split('/')[0] == mask.split('/')[0]


def test_overlays_are_not_offered_as_images(tmp_path):
    """They show the truth."""
    fill(tmp_path / 'set', [f'{n}.png' for n in range(9)], [f'{n}_gt.png' for n in range(9)])
    fill(tmp_path / 'set', [f'{n}_overlay.png' for n in range(9)], [])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines and not [line for line in lines if 'overlay' in line.split(' mask')[0]]


def test_three_grey_levels_are_offered_as_classes(tmp_path):
    """Disc and cup: 0, 128, 255; 255 may be void or a class, so both lines are there."""
    folder, place = coded_set(tmp_path / 'set', [0, 128, 255])
    lines = [line.split(' type ')[1] for line in ask(folder).problems if ' type mask_values="{0' in line]
    assert lines == ['mask_values="{0: 0, 128: 1, 255: 2}"', 'mask_values="{0: 0, 128: 1, 255: 255}"']
    config, data = inspect(folder, **typed(lines[0]))
    assert (mask_of(data, config, '1') == place).all()


def test_ids_that_could_be_classes_are_suspected(tmp_path):
    """0 to n in each mask, with few different n: taken as classes, but said."""
    for n in range(12):
        save(tmp_path / f'set/images/{n}.png', np.zeros((16, 16, 3)))
        save(tmp_path / f'set/masks/{n}.png', np.resize([*range([4, 6, 8][n % 3])], 16)[:, None].repeat(16, 1))
    _, data = inspect(tmp_path / 'set')
    assert data.coding.num_classes == 8 and [note for note in data.notes if 'mask_values=nonzero' in note]


def test_splits_in_folder_names_such_as_traincrop(tmp_path):
    """Crack500 and DeepCrack."""
    for split in ('train', 'val', 'test'):
        fill(tmp_path / 'a', [f'{split}crop/{split}{n}.jpg' for n in range(3)],
             [f'{split}crop/{split}{n}.png' for n in range(3)])
        fill(tmp_path / 'b', [f'{split}_img/{split}{n}.jpg' for n in range(3)],
             [f'{split}_lab/{split}{n}.png' for n in range(3)])
    for name in 'ab':
        _, data = inspect(tmp_path / name)
        assert [len(data.pairs.rows(s)) for s in train_unet.SPLITS] == [3, 3, 3]


def test_names_that_end_in_ts_name_no_split(tmp_path):
    """BraTS, KiTS and LiTS are sets; nnU-Net's imagesTs are for testing."""
    fill(tmp_path / 'set', *[[f'{s}/{kind}/{n}.png' for s in ('LiTS', 'CHAOS') for n in range(3)]
                             for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.rows('test')) == 0 and len(data.pairs.images) == 6
    assert train_unet.read_place('imagesTs')[:2] == ('test', 'image')


def test_frames_with_annotations_are_images(tmp_path):
    """RUGD."""
    fill(tmp_path / 'set', [f'RUGD_frames-with-annotations/park/{n}.png' for n in range(4)],
         [f'RUGD_annotations/park/{n}.png' for n in range(4)])
    assert len(inspect(tmp_path / 'set')[1].pairs.images) == 4


def test_an_empty_file_is_called_empty(small_set):
    (small_set / 'images/003.png').write_bytes(b'')
    assert 'images/003.png: cannot be read: ValueError: is empty' in str(ask(small_set))


# --- what public sets taught ----------------------------------------------------------


def test_one_word_inside_the_names_differs(tmp_path):
    """855_sat_01 and 855_mask_01; KITTI's um_000001 and um_road_000001, with um_lane_000001 left over."""
    fill(tmp_path / 'forest', [f'images/{n}_sat_{n % 3:02}.png' for n in range(101, 108)],
         [f'masks/{n}_mask_{n % 3:02}.png' for n in range(101, 108)])
    _, data = inspect(tmp_path / 'forest')
    assert partners(data, tmp_path / 'forest') == {f'images/{n}_sat_{n % 3:02}.png': f'masks/{n}_mask_{n % 3:02}.png'
                                                   for n in range(101, 108)}
    kinds = ('um', 'umm', 'uu')
    fill(tmp_path / 'kitti', [f'image_2/{k}_{n:06}.png' for k in kinds for n in range(3)],
         [f'gt_image_2/{k}_road_{n:06}.png' for k in kinds for n in range(3)] +
         [f'gt_image_2/um_lane_{n:06}.png' for n in range(3)])
    line = typed_lines(ask(tmp_path / 'kitti'))[0]
    _, data = inspect(tmp_path / 'kitti', **typed(line))
    assert partners(data, tmp_path / 'kitti') == {f'image_2/{k}_{n:06}.png': f'gt_image_2/{k}_road_{n:06}.png'
                                                  for k in kinds for n in range(3)}


def test_the_parts_of_a_name_around_the_word_that_differs_stay_apart(tmp_path):
    """S1Img12 and S11Seg2 have the same letters beside Img and Seg, and are not a pair."""
    fill(tmp_path / 'set', ['images/S2Img3.png', 'images/S3Img5.png', 'images/S1Img12.png'],
         ['masks/S2Seg3.png', 'masks/S3Seg5.png', 'masks/S11Seg2.png'])
    error = str(ask(tmp_path / 'set'))
    assert 'without a mask' in error and 'S1Img12.png' in error and 'S11Seg2.png' in error


def test_affixes_that_pair_a_few_are_a_chance(tmp_path):
    """skip_unpaired=True skips what is left over, not most of the files."""
    fill(tmp_path / 'set', [f'images/a{n}.png' for n in range(9)] + ['images/b_x.png'],
         [f'masks/{n}{n}q.png' for n in range(9)] + ['masks/b_y.png'])
    assert 'do not pair' in ask(tmp_path / 'set', skip_unpaired=True).title


def test_an_image_is_never_its_own_mask(tmp_path):
    fill(tmp_path / 'set', [f'A{k}/{k}{n}.png' for k in '12' for n in range(4)], [])
    error = ask(tmp_path / 'set', images='A*', masks='A1', skip_unpaired=True)
    assert 'image and its mask at once' in str(error)
    assert 'masks="A' not in str(error)


def test_photographs_are_not_offered_as_masks(tmp_path):
    """Both lines pair everything; what the files hold tells which of them is right."""
    draw = np.random.default_rng(0)
    for n in range(6):
        photo = draw.integers(0, 256, (40, 40, 3))
        save(tmp_path / f'set/1/s{n}.png', photo)
        save(tmp_path / f'set/2/s{n}.png', np.arange(1600).reshape(40, 40) % 40 // 20 * 255)
    assert typed_lines(ask(tmp_path / 'set')) == ['images="1" masks="2"']


@pytest.mark.parametrize('split', ['val', 'test'])
def test_a_set_that_is_all_in_one_split_is_split_afresh(tmp_path, split):
    """RailSem19 has only rs19_val, MVTec's masks lie all in test/."""
    fill(tmp_path / 'set', *[[f'{kind}/{split}/{n}.png' for n in range(10)] for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    assert [len(data.pairs.rows(name)) for name in train_unet.SPLITS] == [8, 2, 0]
    assert data.notes == ['no image is named for training: all of them were split afresh']
    _, data = inspect(tmp_path / 'set', val_fraction=0)                # as evaluate asks
    assert (data.pairs.splits == train_unet.SPLITS.index(split)).all() and 'afresh' not in str(data.notes)


def test_folders_with_the_same_folders_inside_are_brothers(tmp_path):
    """human brain/tissue images, human brain/mask binary; human liver/...: a star stands for the organ."""
    for organ in ('human brain', 'human liver', 'mouse heart'):
        name = organ.replace(' ', '_')
        fill(tmp_path / 'set', [f'{organ}/tissue images/{name}_{n}.png' for n in range(4)],
             [f'{organ}/{kind}/{name}_{n}.png' for n in range(4) for kind in ('mask binary', 'mask border')])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert 'images="*/tissue images" masks="*/mask binary"' in lines
    _, data = inspect(tmp_path / 'set', **typed('images="*/tissue images" masks="*/mask binary"'))
    assert len(data.pairs.images) == 12


def test_matrix_inside_a_matlab_struct(tmp_path):
    """CrackForest: groundTruth.Segmentation beside groundTruth.Boundaries."""
    for n in range(4):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        mask = np.ones((8, 8), np.uint8)
        mask[n] = 2
        path = tmp_path / f'set/masks/{n}.mat'
        path.parent.mkdir(exist_ok=True)
        scipy.io.savemat(path, {'groundTruth': {'Segmentation': mask, 'Boundaries': mask * 0}})
    config, data = inspect(tmp_path / 'set', mask_values={1: 0, 2: 1})
    assert mask_of(data, config, '2').sum(1).tolist() == [0, 0, 8, 0, 0, 0, 0, 0]
    scipy.io.savemat(tmp_path / 'set/masks/0.mat', {'a': mask, 'b': mask})
    assert 'holds 2 matrices; expected one: a, b' in str(ask(tmp_path / 'set'))


def test_deep_masks_of_many_values_are_asked_about(tmp_path):
    """16-bit ids of cells that are numbered through: as 8-bit class numbers the same values pass, with a note."""
    for depth in (np.uint16, np.uint8):
        draw = np.random.default_rng(0)
        folder = tmp_path / np.dtype(depth).name
        for n in range(12):
            fill(folder, [f'images/{n}.png'], [])
            mask = np.zeros((8, 8), depth)
            mask[:5, 0] = draw.choice(np.arange(1, 31), 5, replace=False)
            mask[7] = n + 19
            save(folder / f'masks/{n}.png', mask, 'I;16' if depth == np.uint16 else None)
    first, *others = [line for line in str(ask(tmp_path / 'uint16')).splitlines() if 'type ' in line]
    assert 'mask_values=nonzero' in first and any('{0: 0' in line for line in others)
    _, data = inspect(tmp_path / 'uint8')
    assert any('most masks hold few of the numbers' in note for note in data.notes)


def test_evenly_spaced_values_may_be_a_scale(tmp_path):
    """0, 64, 128, 191, 255 (four experts): 255 may be a class or what is ignored, both lines are there."""
    for n in range(4):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        mask = np.zeros((8, 8))
        mask[0, :4] = [64, 128, 191, 255]
        save(tmp_path / f'set/masks/{n}.png', mask)
    said = str(ask(tmp_path / 'set'))
    assert '255: 4' in said and '255: 255' in said


def test_masks_of_another_scale(tmp_path):
    """CelebAMask-HQ: images of 1024 pixels, masks of 512. Named, with the line; brought to size when asked."""
    for n in range(4):
        save(tmp_path / f'set/images/{n}.png', np.zeros((21, 40, 3)))
        save(tmp_path / f'set/masks/{n}.png', np.eye(10, 20, dtype=int))
    error = ask(tmp_path / 'set')
    assert 'is 40 x 21 pixels' in str(error) and offered(error, 'rescale') == 'rescale_masks=True'
    data, _ = dataset(tmp_path / 'set', rescale_masks=True, num_classes=2)
    image, mask = data.read(0)
    assert image.shape[:2] == mask.shape == (21, 40) and set(np.unique(mask)) == {0, 1}
    assert mask[:2, :2].all() and mask[-2:, 18:20].all()
    inspect(tmp_path / 'set', rescale_masks=True)                      # remembered; asked again without:
    assert 'rescale_masks=True' in str(ask(tmp_path / 'set'))
    save(tmp_path / 'set/masks/0.png', np.eye(20, 20, dtype=int))
    assert 'masks/0.png 20 x 20' in str(ask(tmp_path / 'set', rescale_masks=True))
    save(data.name(0).replace('images', 'masks'), np.eye(20, 20, dtype=int))
    with pytest.raises(DataError, match='is 40 x 21 pixels'):          # replaced in mid-run: never stretched to fit
        data.read(0)





# --- what an audit by running found --------------------------------------------------


def palette_set(folder, colours, masks):
    """Palette masks with these colours; each mask is a list of the indices in its rows -> the folder."""
    draw_set(folder, count=len(masks), size=12)
    for path, rows in zip(sorted((folder / 'masks').iterdir()), masks):
        mask = PIL.Image.fromarray(np.repeat(np.resize(rows, 12), 12).reshape(12, 12).astype(np.uint8), 'P')
        mask.putpalette([number for colour in colours for number in colour])
        mask.save(path)
    return folder


@pytest.mark.parametrize('colours', [[(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0)],
                                     [(0, 0, 0), (85, 85, 85), (170, 170, 170), (255, 255, 255)]])
def test_a_palette_of_classes_is_one_in_every_file(tmp_path, colours):
    """Some masks use only black and white of it: their numbers are classes all the same."""
    top = colours.index((255, 255, 255))
    masks = [[0, 1, 2, 3], [0, top], [0, top], [0, 3, 2, 1], [0, 1, 2, 3], [0, top]]
    _, data = inspect(palette_set(tmp_path / 'set', colours, masks))
    assert data.coding.num_classes == 4 and data.values[top][1] == 6 and 255 not in data.values


def test_the_mask_is_never_interpolated(small_set, tmp_path):
    wish = saved(tmp_path / 'a.json', A.Affine(rotate=(20, 30), mask_interpolation=1, p=1.0))
    data, _ = dataset(small_set, augment=wish)
    assert set(data[(0, 0)]['mask'].unique().tolist()) <= {0, 1, 255}


@pytest.mark.parametrize('step, size', [(A.RandomScale(0.5, p=0.5), [32, 32]), (A.RandomRotate90(p=0.5), [32, 64]),
                                        (A.ToGray(num_output_channels=1, p=0.5), [32, 32])])
def test_a_pipeline_that_changes_the_size_is_refused(tmp_path, step, size):
    config = {**train_unet.CONFIG, 'augment': saved(tmp_path / 'a.json', step), 'image_size': size,
              'image_dtype': 'uint8'}
    with pytest.raises(ConfigError, match='that suits these images'):
        train_unet.build_augmentation(config)


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
    (A.Compose([A.Affine(rotate=(-5, 5))]), yaml.dump)], ids=['ReplayCompose', 'one transform', 'yaml.dump'])
def test_pipelines_are_read_however_they_were_saved(tmp_path, pipeline, dump):
    path = tmp_path / ('a.json' if dump is json.dumps else 'a.yaml')
    image, mask = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
    made = built(path, dump(A.to_dict(pipeline)))(image=image, mask=mask)
    assert made['image'].shape == (32, 32, 3)


def test_a_turned_tiff_of_8_bits_is_turned_back(tmp_path):
    """Orientation 6: stored 20 x 30, to be looked at as 30 x 20, which its mask is."""
    for number in range(4):
        path = tmp_path / 'set' / 'images' / f'{number}.tif'
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = PIL.Image.fromarray(np.random.default_rng(number).integers(0, 255, (20, 30, 3), dtype=np.uint8))
        picture.save(path, tiffinfo={274: 6})
        save(tmp_path / 'set' / 'masks' / f'{number}.png', 255 * (np.arange(600).reshape(30, 20) > 300))
    config, data = inspect(tmp_path / 'set')
    assert list(data.sizes) == [(30, 20)]
    assert train_unet.read_image(str(tmp_path / 'set' / 'images' / '0.tif'), config).shape == (30, 20, 3)


def test_a_turned_tiff_of_16_bits_is_refused_not_taken_as_it_lies(tmp_path):
    tifffile.imwrite(tmp_path / 'x.tif', np.zeros((8, 8, 3), np.uint16), photometric='rgb',
                     extratags=[(274, 3, 1, 3, True)])
    with pytest.raises(DataError, match='carries a rotation'):
        train_unet.read_image(str(tmp_path / 'x.tif'), train_unet.CONFIG)


def test_the_table_counts_all_pixels_and_images_of_each_class(tmp_path):
    """With a threshold, too; of the validation images as well."""
    folder = draw_set(tmp_path / 'set', count=8, size=16)
    truth = [np.array(PIL.Image.open(path)) > 127 for path in sorted((folder / 'masks').iterdir())]
    for wish in (None, '>127', 'nonzero'):
        config, data = inspect(folder, mask_values=wish)
        [line] = [line for line in train_unet.describe_data(data, config) if '1 foreground' in line and '->' in line]
        assert f'{np.mean(truth):.3%}' in line and line.split()[-1] == '8'


def noisy_reds(folder):
    """Colour masks, the upper half red, the lower black, each with noise -> the folder."""
    draw = np.random.default_rng(0)
    for number in range(4):
        mask = np.zeros((40, 40, 3), np.int64)
        mask[:20] = (240, 10, 10)
        save(folder / 'masks' / f'{number}.png', mask + draw.integers(0, 12, mask.shape))
        save(folder / 'images' / f'{number}.png', draw.integers(0, 255, (40, 40, 3)))
    return folder


def test_the_table_shows_every_class_where_values_are_many(tmp_path):
    """JPEG noise around two colours, of which one is named: hundreds of values."""
    config, data = inspect(noisy_reds(tmp_path / 'set'), mask_values={'#f00a0a': 1})
    lines = train_unet.describe_data(data, config)
    assert len(data.values) > 256 and any('1 foreground' in line and '50.000%' in line for line in lines)


def test_a_colour_that_only_its_noise_shows_is_found(tmp_path):
    """'#ff0000' typed, and no pixel is exactly that."""
    assert inspect(noisy_reds(tmp_path / 'set'), mask_values={'#ff0000': 1})[1].shares[1] == 0.5


def test_noise_of_jpeg_is_no_object_where_masks_are_united(tmp_path):
    y, x = np.mgrid[:64, :64]
    disc = (y - 32) ** 2 + (x - 32) ** 2 < 200
    for number in range(4):
        folder = tmp_path / 'set' / f'cell{number}'
        save(folder / 'images' / f'cell{number}.png', np.random.default_rng(number).integers(0, 255, (64, 64, 3)))
        (folder / 'masks').mkdir()
        for part, half in enumerate((disc & (x < 32), disc & (x >= 32))):
            PIL.Image.fromarray((255 * half).astype(np.uint8)).save(folder / 'masks' / f'{part}.jpg', quality=60)
    assert inspect(tmp_path / 'set')[1].shares[1] == pytest.approx(disc.mean(), rel=0.1)


def test_minus_one_is_ignored_with_nonzero_too(tmp_path):
    for number in range(4):
        mask = np.zeros((8, 8), np.int16)
        mask[0], mask[1] = -1, number + 300
        save(tmp_path / 'set' / 'images' / f'{number}.png', np.random.default_rng(number).integers(0, 255, (8, 8, 3)))
        (tmp_path / 'set' / 'masks').mkdir(exist_ok=True)
        np.save(tmp_path / 'set' / 'masks' / f'{number}.npy', mask)
    config, data = inspect(tmp_path / 'set', mask_values='nonzero')
    assert mask_of(data, config, '0')[:3, 0].tolist() == [255, 1, 0]


@pytest.mark.parametrize('wish, line', [('<128', '">127"'), ('>127', '"<128"')])
def test_the_line_for_inverted_thresholds_turns_them(tmp_path, wish, line):
    for number in range(4):
        mask = np.full((10, 10), 0 if wish == '<128' else 255)
        mask[0, 0] = 255 - mask[0, 0]
        save(tmp_path / 'set' / 'masks' / f'{number}.png', mask)
        save(tmp_path / 'set' / 'images' / f'{number}.png', np.random.default_rng(number).integers(0, 255, (10, 10, 3)))
    assert any(f'type mask_values={line}' in note for note in inspect(tmp_path / 'set', mask_values=wish)[1].notes)


def test_a_list_may_have_semicolons(small_set):
    """As Excel writes them where the comma is for decimals."""
    rows = [f'images/{n:03d}.png;masks/{n:03d}.png' for n in range(12)]
    (small_set / 'list.csv').write_text('\n'.join(['image;mask', *rows]))
    assert len(inspect(small_set / 'list.csv')[1].pairs.images) == 12


def test_a_list_may_have_spaces_and_capitals_in_its_header_and_folders_for_groups(tmp_path):
    folder = draw_set(tmp_path / 'set', count=8, size=16)
    lines = ['Image, Mask']
    for number in range(8):
        for kind in ('images', 'masks'):
            (folder / f'patient{number // 2}').mkdir(exist_ok=True)
            (folder / kind / f'{number:03d}.png').rename(folder / f'patient{number // 2}' / f'{kind}{number}.png')
        lines.append(f'patient{number // 2}/images{number}.png, patient{number // 2}/masks{number}.png')
    (folder / 'list.csv').write_text('\n'.join(lines))
    config = {**train_unet.CONFIG, 'data': str(folder / 'list.csv'), 'group_pattern': r'patient\d+',
              'val_fraction': 0.25}
    pairs = train_unet.find_pairs(config)
    patients = [{os.fsdecode(pairs.images[row]).split('/')[-2] for row in pairs.rows(split)}
                for split in ('train', 'val')]
    assert len(patients[0]) == 3 and len(patients[1]) == 1 and not patients[0] & patients[1]


def test_a_list_that_names_a_file_as_its_own_mask_is_refused(small_set):
    (small_set / 'list.csv').write_text('image,mask\nimages/000.png,images/000.png\nimages/001.png,masks/001.png\n')
    with pytest.raises(DataError, match='an image and its mask at once'):
        train_unet.find_pairs({**train_unet.CONFIG, 'data': str(small_set / 'list.csv')})


def test_thirty_unnamed_values_are_all_in_the_line_to_type(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, *range(50, 82)])
    with pytest.raises(DataError) as caught:
        inspect(folder, mask_values={0: 0, 50: 1})
    assert '81: 255' in str(caught.value)


# --- what was once read wrongly without a word ---------------------------------------


def noisy_jpeg(path, mask):
    """A mask as JPEG with the noise of quality 60."""
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(mask.astype(np.uint8)).save(path, quality=60)


DISC = np.hypot(*np.mgrid[-24:24, -24:24]) < 14


def disc_set(folder, write, count=6):
    """`count` images of 48 x 48; write(number) makes each mask."""
    for number in range(count):
        save(folder / f'images/{number}.png', np.zeros((48, 48, 3)))
        write(number)
    return folder


@pytest.mark.parametrize('other', ['jpeg', 'rgb'])
def test_masks_of_ones_beside_bright_ones_are_refused(tmp_path, other):
    def write(number):
        if number < 3:
            save(tmp_path / f'set/masks/{number}.png', DISC)
        elif other == 'jpeg':
            noisy_jpeg(tmp_path / f'set/masks/{number}.jpg', 255 * DISC)
        else:
            save(tmp_path / f'set/masks/{number}.png', 255 * np.stack([DISC] * 3, -1))

    with pytest.raises(DataError, match='3 masks hold 0 and 1, 3 others 0 and 255'):
        inspect(disc_set(tmp_path / 'set', write))


def test_a_stray_pixel_of_one_does_not_make_the_foreground_ignored(tmp_path):
    def write(number):
        mask = 255 * DISC
        mask[0, 0] = 1
        save(tmp_path / f'set/masks/{number}.png', mask)

    with pytest.raises(DataError, match='if only 255 is foreground type mask_values'):
        inspect(disc_set(tmp_path / 'set', write))


def test_a_set_of_one_class_is_refused(tmp_path):
    folder = disc_set(tmp_path / 'set', lambda n: save(tmp_path / f'set/masks/{n}.png', np.full((48, 48), 255)))
    with pytest.raises(DataError, match='every pixel of the training masks is of one class'):
        dataset(folder)


@pytest.mark.parametrize('colour', [lambda n: 255 if n % 2 else 255 * DISC[..., None], lambda n: [255 * (n % 2), 0, 0],
                                    lambda n: np.random.default_rng(n).integers(0, 256, (48, 48, 3))])
def test_a_shape_that_is_only_in_the_alpha_channel_is_refused(tmp_path, colour):
    """White in some files, one colour in each, or cut out of a photograph: all of the picture would be foreground."""
    def write(number):
        pixels = np.zeros((48, 48, 4), np.uint8)
        pixels[..., :3], pixels[..., 3] = colour(number), 255 * DISC
        save(tmp_path / f'set/masks/{number}.png', pixels)

    with pytest.raises(DataError, match='its shape is in the alpha channel'):
        inspect(disc_set(tmp_path / 'set', write))


def test_united_masks_are_those_of_the_pattern(tmp_path):
    for n in range(4):
        save(tmp_path / f'set/images/cell{n}.png', np.zeros((8, 8, 3)))
        objects(tmp_path / f'set/masks/cell{n}', ['obj_1.png', 'obj_2.png'])
        save(tmp_path / f'set/masks/cell{n}/preview.png', np.full((8, 8), 255))
    config, data = inspect(tmp_path / 'set', mask_pattern='obj_{stem}.png')
    assert mask_of(data, config, 'cell0').sum() == 16                  # two rows of eight


def test_grey_gifs_are_read_by_their_greys(tmp_path):
    path = tmp_path / 'x.gif'
    PIL.Image.fromarray(np.array([[0, 128], [128, 255]], np.uint8)).convert('P').save(path)
    assert set(np.unique(train_unet.read_mask(str(path), train_unet.CONFIG))) == {0, 128, 255}


def test_a_white_class_of_a_palette_stays_a_class(tmp_path):
    palette = [value for n in range(24) for value in (n, 2 * n, 3 * n)]
    palette[60:63] = 255, 255, 255
    for n in range(6):
        save(tmp_path / f'set/images/{n}.png', np.zeros((48, 48, 3)))
        picture = PIL.Image.fromarray((20 * DISC).astype(np.uint8)).convert('L')
        picture.putpalette(palette)
        (tmp_path / 'set/masks').mkdir(exist_ok=True)
        picture.save(tmp_path / f'set/masks/{n}.png')
    codes = train_unet.read_mask(str(tmp_path / 'set/masks/0.png'), train_unet.CONFIG)
    assert set(np.unique(codes)) == {0, 20}


@pytest.mark.parametrize('wish', [{255: 1}, {0: 0, 255: 1}])
def test_named_white_takes_the_noise_around_it(tmp_path, wish):
    folder = disc_set(tmp_path / 'set', lambda n: noisy_jpeg(tmp_path / f'set/masks/{n}.jpg', 255 * DISC))
    config, data = inspect(folder, mask_values=wish)
    assert (mask_of(data, config, '0') == DISC).mean() > 0.995


def test_class_numbers_in_jpeg_are_not_believed(tmp_path):
    folder = disc_set(tmp_path / 'set', lambda n: noisy_jpeg(tmp_path / f'set/masks/{n}.jpg', 20 * DISC))
    with pytest.raises(DataError, match='the masks are JPEG, whose noise makes values of its own'):
        inspect(folder)


def test_what_is_ignored_is_so_beside_a_threshold_too(tmp_path):
    folder, place = coded_set(tmp_path / 'set', [0, 1, 2, 3, 255])
    _, data = inspect(folder, mask_values='nonzero')
    assert (data.coding.encode(np.array([0, 1, 3, 255])) == [0, 1, 1, 255]).all()
    folder, place = coded_set(tmp_path / 'bright', [0, 200, 255])
    _, data = inspect(folder, mask_values='>127')
    assert (data.coding.encode(np.array([0, 200, 255])) == [0, 1, 1]).all()
    _, data = inspect(folder, mask_values='>127', ignore_index=200)
    assert (data.coding.encode(np.array([0, 200, 255])) == [0, 255, 1]).all()


def test_a_blank_mask_in_a_list_is_no_mask(tmp_path):
    save(tmp_path / 'a.png', np.zeros((8, 8, 3)))
    (tmp_path / 'list.csv').write_text('image,mask\na.png, \n')
    with pytest.raises(DataError, match='line 2: image and mask must both be given'):
        inspect(tmp_path / 'list.csv')


def test_the_chance_of_a_pipeline_holds_for_crops_too(small_set, tmp_path):
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(A.Compose([A.InvertImg(p=1)], p=0.0))))
    data, _ = dataset(small_set, augment=str(tmp_path / 'p.json'), size_policy='crop')
    assert max(data[(0, i)]['image'].float().mean() for i in range(len(data))) < 127


def test_no_pipeline_interpolates_the_mask(tmp_path):
    step = A.RandomResizedCrop((32, 32), scale=(0.5, 0.9), area_for_downscale='image_mask', p=1)
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(A.Compose([step]))))
    pipeline = train_unet.load_augmentation(str(tmp_path / 'p.json'), (96, 96, 3), 'uint8')
    mask = np.where(np.random.default_rng(0).random((96, 96)) > 0.5, 255, 0).astype(np.uint8)
    for _ in range(8):
        assert set(np.unique(pipeline(image=np.zeros((96, 96, 3), np.uint8), mask=mask)['mask'])) <= {0, 255}


def test_float_images_are_not_cut_off_by_a_pipeline(tmp_path):
    for n in range(6):
        save(tmp_path / f'set/images/{n}.npy', np.full((32, 32, 1), 900.0 + n, np.float32))
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.mgrid[:32, :32][0] > 16))
    steps = A.Compose([A.RandomBrightnessContrast(p=0.01)])
    (tmp_path / 'p.json').write_text(json.dumps(A.to_dict(steps)))
    data, _ = dataset(tmp_path / 'set', augment=str(tmp_path / 'p.json'), in_channels=1)
    with pytest.raises(DataError, match='limit float images to 0..1'):
        data[(0, 0)]


def test_a_fourth_band_of_an_array_is_not_dropped(tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (8, 8, 4)).astype(np.uint8)
    np.save(tmp_path / 'x.npy', array)
    with pytest.raises(DataError, match='type in_channels=4'):
        train_unet.read_image(str(tmp_path / 'x.npy'), train_unet.CONFIG)
    array[..., 3] = 255                                                # an opaque alpha
    np.save(tmp_path / 'x.npy', array)
    assert train_unet.read_image(str(tmp_path / 'x.npy'), train_unet.CONFIG).shape == (8, 8, 3)


def test_a_constant_band_is_not_blown_up(tmp_path):
    for n in range(6):
        pixels = np.random.default_rng(n).integers(0, 255, (32, 32, 3)) * np.array([1, 1, 0])
        save(tmp_path / f'set/images/{n}.png', pixels)
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.mgrid[:32, :32][0] > 16))
    data, config = dataset(tmp_path / 'set')
    assert train_unet.image_statistics(data, config)[1][2] == 1


def test_the_order_of_bytes_changes_nothing(tmp_path):
    array = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for name, kind in (('little', '<u2'), ('big', '>u2')):
        np.save(tmp_path / f'{name}.npy', array.astype(kind))
    one, other = (train_unet.read_image(str(tmp_path / f'{name}.npy'), train_unet.CONFIG) for name in ('little', 'big'))
    assert np.array_equal(one, other) and one.max() <= 1


def test_validation_without_foreground_is_told(tmp_path):
    for split, top in (('train', 255), ('val', 0)):
        for n in range(3):
            save(tmp_path / f'set/images/{split}/{n}.png', np.zeros((48, 48, 3)))
            save(tmp_path / f'set/masks/{split}/{n}.png', top * DISC)
    _, data = inspect(tmp_path / 'set')
    assert [note for note in data.notes if note.startswith('no validation mask has class 1')]


def test_all_groups_of_a_group_pattern_count(tmp_path):
    names = [f'patient{p}_{side}_{n}' for p in range(6) for side in ('left', 'right') for n in range(3)]
    for name in names:
        save(tmp_path / f'set/images/{name}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'set/masks/{name}.png', 255 * (np.mgrid[:8, :8][0] > 4))
    _, data = inspect(tmp_path / 'set', group_pattern='^(patient.)_(left|right)')
    assert len(data.pairs.rows('val')) in (6, 9)                       # whole sides, not half of all


def test_groups_that_folders_tear_apart_are_told(tmp_path):
    for split in ('train', 'val'):
        for name in ('video0_a', 'video1_a'):
            save(tmp_path / f'set/images/{split}/{name}{split}.png', np.zeros((8, 8, 3)))
            save(tmp_path / f'set/masks/{split}/{name}{split}.png', 255 * (np.mgrid[:8, :8][0] > 4))
    _, data = inspect(tmp_path / 'set', group_pattern=r'^video\d')
    assert any(note.startswith('2 of 2 groups of images') for note in data.notes)


# --- shared memory, a fourth band ---

@pytest.mark.parametrize('megabytes, workers, ahead', [(64, 1, 1), (200, 3, 1), (4000, 3, 4)])
def test_workers_fit_into_the_shared_memory_of_a_container(tmp_path, monkeypatch, megabytes, workers, ahead):
    """Docker gives 64 MiB, and a worker that finds no room dies: 16 images of 800 x 800 x 3 bytes and masks are 41."""
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(2**33, 0, megabytes * 2**20))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(4)), raising=False)
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
    train_unet.build_loader(images, config, torch.device('cpu'))
    assert 'num_workers=6: /dev/shm has room for 1 batches only' in caplog.text and '--shm-size' in caplog.text


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
    loader = train_unet.build_loader(images, config, torch.device('cpu'), batch_size=count)
    assert loader.num_workers == workers


def test_a_fourth_band_is_told_of_and_taken_if_asked(tmp_path):
    """As GDAL writes near infrared beside red, green and blue."""
    rng, folder = np.random.default_rng(0), tmp_path / 'set'
    bands = rng.integers(0, 256, (32, 32, 4), np.uint8)
    for number in range(4):
        save(folder / f'masks/{number}.png', np.eye(32, dtype=int))
        (folder / 'images').mkdir(exist_ok=True)
        tifffile.imwrite(folder / f'images/{number}.tif', bands, photometric='rgb', extrasamples=['unspecified'])
    config, data = inspect(folder)
    assert any('in_channels=4 takes it' in note for note in data.notes)
    config, data = inspect(folder, in_channels=4)
    assert not any('fourth band' in note for note in data.notes)
    assert (train_unet.read_image(folder / 'images/0.tif', {**config, 'image_dtype': 'uint8'}) == bands).all()


# --- found by reading the data sections once more ---

def test_masks_of_ignored_values_alone_are_told_of(tmp_path):
    coded_set(tmp_path / 'set', [255, -1], '.npy')
    with pytest.raises(DataError, match="nothing but -1, 255.*type mask_values='?\"?{-1: 0, 255: 1}"):
        inspect(tmp_path / 'set')


@pytest.mark.parametrize('value', [-2**32, 2**32, -3e38])
def test_a_number_that_does_not_fit_is_refused_not_wrapped(tmp_path, value):
    coded_set(tmp_path / 'set', [0, 1])
    save(tmp_path / 'set/masks/0.npy', np.full((4, 16), value))
    os.remove(tmp_path / 'set/masks/0.png')
    with pytest.raises(DataError, match='0.npy: holds the number .*must be below'):
        inspect(tmp_path / 'set')


def test_a_fourth_band_of_an_array_is_not_lost_whatever_its_suffix(tmp_path):
    path = tmp_path / 'x.NPY'
    with open(path, 'wb') as file:
        np.save(file, np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8))
    with pytest.raises(DataError, match='has 4 channels'):
        train_unet.read_image(path, {**train_unet.CONFIG, 'image_dtype': 'uint8'})


def test_a_damaged_tiff_is_told_of_by_its_name_alone(small_set, capfd, caplog):
    path = next((small_set / 'images').glob('*'))
    path.unlink()
    path.with_suffix('.tif').write_bytes(b'II*\0\xff\xff\xff\x7f' + bytes(50))
    assert train_unet.main(['check', f'data={small_set}', *WORDS]) == 2
    assert f'{path.stem}.tif: cannot be read' in capfd.readouterr().err
    assert not [record for record in caplog.records if record.name == 'tifffile']


@pytest.mark.parametrize('name', ['x.tif', 'x.npy'])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match='is no file'):
        train_unet.open_image(tmp_path / name, train_unet.CONFIG)
    assert train_unet.flatness(str(tmp_path / name), train_unet.CONFIG) == 0


# --- one file missing, soft colours, and other things of real sets ---------------------


@pytest.mark.parametrize('images, masks', [
    ([f'{s}/{s}_{n:03}.jpg' for s in ('left', 'right') for n in range(6)],
     [f'{s}/{s}_{n:03}_mask.png' for s in ('left', 'right') for n in range(6)]),
    ([f'p{p}/p{p}_{n}.tif' for p in range(3) for n in range(1, 6)],
     [f'p{p}/p{p}_{n}_mask.tif' for p in range(3) for n in range(1, 6)]),
], ids=['cameras', 'patients'])
def test_one_missing_mask_is_skipped_and_no_other_paired_with_its_image(tmp_path, images, masks):
    fill(tmp_path / 'set', images, masks[:-1])
    assert typed_lines(ask(tmp_path / 'set')) == ['skip_unpaired=True']
    _, data = inspect(tmp_path / 'set', skip_unpaired=True)
    assert partners(data, tmp_path / 'set') == dict(zip(images, masks[:-1]))


def test_further_masks_of_an_image_are_united_with_its_first(tmp_path):
    """BUSI: one image has a second mask, benign (2)_mask_1.png. 0 and 255 stay what they are in the others."""
    fill(tmp_path / 'set', [f'b/benign ({n}).png' for n in range(6)], [])
    for n in range(6):
        save(tmp_path / f'set/b/benign ({n})_mask.png', np.eye(8, dtype=np.uint8) * 255)
    second = np.zeros((8, 8), np.uint8)
    second[6:] = 255
    save(tmp_path / 'set/b/benign (2)_mask_1.png', second)
    config, data = inspect(tmp_path / 'set')
    assert ', masks of an image united: ' in data.pairs.rule
    of_second = [os.fsdecode(mask) for mask in data.pairs.masks if b'(2)' in mask]
    first = train_unet.read_mask(tmp_path / 'set/b/benign (2)_mask.png', config)
    assert np.array_equal(train_unet.read_mask(of_second[0], config), np.maximum(first, second))
    assert sorted(data.values) == [0, 255] and 'benign (2)_mask.png + ' in train_unet.clean(of_second[0])
    # the second mask counts in what is known of the set: changed, it is read again
    save(tmp_path / 'set/b/benign (2)_mask_1.png', np.tril(np.full((8, 8), 255), -1))
    assert inspect(tmp_path / 'set')[1].values[255][0] > data.values[255][0]
    save(tmp_path / 'set/b/benign (2)_mask_1.png', np.zeros((8, 9)))
    assert 'mask without an image: ' in str(ask(tmp_path / 'set')) and '_mask_1.png' in str(ask(tmp_path / 'set'))


def test_numbered_masks_of_other_images_are_not_united(tmp_path):
    """Where an image lacks its mask, where no word says mask, or where a file is saved twice."""
    fill(tmp_path / 'a', [f'{n}.png' for n in range(6)] + ['2_1.png'], [f'{n}_mask.png' for n in range(6)])
    objects(tmp_path / 'a', ['2_mask_1.png'])
    assert '2_mask_1.png' in str(ask(tmp_path / 'a')) and 'united' not in str(ask(tmp_path / 'a'))
    fill(tmp_path / 'b', [f'images/{n}.png' for n in range(6)], [f'masks/{n}.png' for n in range(6)])
    objects(tmp_path / 'b', ['masks/2_1.png'])
    assert 'mask without an image' in str(ask(tmp_path / 'b'))


def test_masks_of_several_folders_are_united_where_masks_has_a_star(tmp_path):
    """Montgomery's lungs: ManualMask/leftMask and ManualMask/rightMask."""
    fill(tmp_path / 'set', [f'CXR_png/M{n}_{n % 2}.png' for n in range(6)], [])
    for side, name in enumerate(['leftMask', 'rightMask']):
        for n in range(6):
            mask = np.zeros((8, 8), np.uint8)
            mask[2:6, 4 * side:4 * side + 3] = 255
            save(tmp_path / f'set/ManualMask/{name}/M{n}_{n % 2}.png', mask)
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines == [f'images="CXR_png" masks="ManualMask/{name}"' for name in ('*Mask', 'leftMask', 'rightMask')]
    assert '*Mask"   (6 pairs, masks united: one class)' in str(ask(tmp_path / 'set'))
    _, data = inspect(tmp_path / 'set', **typed(lines[0]))
    assert len(data.pairs.images) == 6 and data.values[255] == [6 * 24, 6]


def test_masks_of_one_thing_by_several_people_are_not_offered_to_be_united(tmp_path):
    fill(tmp_path / 'set', [f'img/{n}.png' for n in range(6)],
         [f'labels/{person}Mask/{n}.png' for n in range(6) for person in ('anna', 'bert')])
    assert typed_lines(ask(tmp_path / 'set')) == [f'images="img" masks="labels/{person}Mask"'
                                                  for person in ('anna', 'bert')]


def test_one_line_stands_for_folders_named_after_those_above(tmp_path):
    """A fish a folder: Trout/Trout with Trout/Trout GT."""
    kinds = ('Trout', 'Shrimp', 'Sea Bass')
    fill(tmp_path / 'set', [f'{kind}/{kind}/{n:05}.png' for kind in kinds for n in range(4)],
         [f'{kind}/{kind} GT/{n:05}.png' for kind in kinds for n in range(4)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines == ['images="*/*" masks="*/* GT"']
    _, data = inspect(tmp_path / 'set', **typed(lines[0]))
    assert partners(data, tmp_path / 'set') == {f'{kind}/{kind}/{n:05}.png': f'{kind}/{kind} GT/{n:05}.png'
                                                for kind in kinds for n in range(4)}


def test_masks_of_another_number_are_not_offered(tmp_path):
    """The Cell Tracking Challenge: 01 with 01_GT, 02 with 02_GT, each from frame 0 on."""
    for k in ('01', '02'):
        fill(tmp_path / 'set', [f'{k}/t{n:03}.tif' for n in range(4)],
             [f'{k}_GT/{kind}/man_{n:03}.tif' for n in range(4) for kind in ('SEG', 'TRA')])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines == ['images="*" masks="*_GT/SEG" skip_unpaired=True']         # TRA holds markers
    _, data = inspect(tmp_path / 'set', **typed(lines[0]))
    assert partners(data, tmp_path / 'set') == {f'{k}/t{n:03}.tif': f'{k}_GT/SEG/man_{n:03}.tif'
                                                for k in ('01', '02') for n in range(4)}


def test_files_that_no_reader_knows_are_named_beside_those_without_a_partner(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(3)], [f'masks/{n}.png' for n in range(4)])
    (tmp_path / 'set/images/3.jp2').write_bytes(b'')
    assert 'ignored 3.jp2' in ask(tmp_path / 'set').problems


def test_files_of_one_name_in_a_folder_for_each_image(tmp_path):
    """What labelme_json_to_dataset writes: the line that is offered gives each image the label beside it."""
    for case in ('cat', 'dog', 'eel'):
        fill(tmp_path / 'set', [f'{case}_json/img.png', f'{case}_json/label_viz.png'], [f'{case}_json/label.png'])
    line, = typed_lines(ask(tmp_path / 'set'))
    assert line == 'image_pattern="{stem}img.png" mask_pattern="{stem}label.png"'
    _, data = inspect(tmp_path / 'set', **typed(line))
    assert partners(data, tmp_path / 'set') == {f'{case}_json/img.png': f'{case}_json/label.png'
                                                for case in ('cat', 'dog', 'eel')}
    assert data.notes == ['ignored 3 files, not like {stem}img.png or {stem}label.png: label_viz.png, ...']
    for case in ('cat', 'dog', 'eel'):
        (tmp_path / f'set/{case}_json/label_viz.png').unlink()
    assert inspect(tmp_path / 'set')[1].pairs.rule == 'their folders'


def test_names_of_a_mac_and_of_windows_are_one(tmp_path):
    images, masks = (['K\u00f6ln.jpg', 'Rom.jfif'], ['Ko\u0308ln.png', 'Rom.png'])
    fill(tmp_path / 'set', [f'images/{name}' for name in images[:1]], [f'masks/{name}' for name in masks])
    PIL.Image.new('RGB', (8, 8)).save(tmp_path / 'set/images/Rom.jfif', 'JPEG')
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {f'images/{a}': f'masks/{b}' for a, b in zip(images, masks)}


def test_a_folder_that_names_two_splits_names_none(tmp_path):
    names = [f'{s}/{n}.png' for s in ('train', 'val') for n in range(3)]
    fill(tmp_path / 'set', [f'TrainVal_images/{name}' for name in names],
         [f'TrainVal_annotations/{name}' for name in names])
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.rows('val')) == 3


@pytest.mark.parametrize('quality', [95, 98, 100])
def test_jpeg_masks_of_high_quality_are_thresholded(tmp_path, quality):
    folder, _ = coded_set(tmp_path / 'set', [0, 255])
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        path.unlink()
        mask = np.zeros((64, 64), np.uint8)
        cv2.circle(mask, (30 + n, 30), 12, 255, -1)
        cv2.imwrite(str(path.with_suffix('.jpg')), mask, [cv2.IMWRITE_JPEG_QUALITY, quality])
        save(folder / f'images/{path.name}', np.zeros((64, 64, 3)))
    _, data = inspect(folder)
    assert data.coding.threshold == 127 and data.coding.num_classes == 2


def test_colours_with_soft_edges_get_a_line_that_works(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        mask = np.zeros((512, 512, 3), np.uint8)
        cv2.circle(mask, (150 + n, 150), 100, (0, 0, 255), -1)
        cv2.circle(mask, (300, 380), 100 + n, (0, 255, 0), -1)
        cv2.imwrite(str(path), cv2.GaussianBlur(mask, (5, 5), 0))
        save(folder / f'images/{path.name}', np.zeros((512, 512, 3)))
    error = ask(folder)
    settings = typed(offered(error, 'mask_values='))
    _, data = inspect(folder, **settings)
    assert 64 < len(data.values) <= 256 and data.coding.num_classes == 3 and 'noise around' in data.coding.words


def test_no_data_of_a_float_image_is_refused(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    image = np.ones((8, 8), np.float32)
    image[0] = np.finfo(np.float32).min
    tifffile.imwrite(folder / 'images/0.tif', image)
    (folder / 'images/0.png').unlink()
    config, _, _ = train_unet.resolve_config(None, {'data': str(folder), 'in_channels': 1})
    with pytest.raises(DataError, match=r'0\.tif: holds pixels that are not finite .*no data'):
        train_unet.read_image(folder / 'images/0.tif', config)


@pytest.mark.parametrize('dtype, values', [(np.uint32, [0, 2**31 + 5]), (np.int8, [-100, 100])])
def test_depths_that_pillow_would_wrap(tmp_path, dtype, values):
    tifffile.imwrite(tmp_path / 'x.tif', np.array([values] * 4, dtype))
    config, _, _ = train_unet.resolve_config(None, {'data': str(tmp_path), 'in_channels': 1})
    read = train_unet.read_image(tmp_path / 'x.tif', config)
    assert read[0, :, 0].tolist() == pytest.approx(values)


@pytest.mark.parametrize('orientation, size', [(3, (16, 4)), (6, (4, 16))])
def test_images_that_their_exif_turns_are_counted(tmp_path, orientation, size):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    exif = PIL.Image.Exif()
    exif[274] = orientation
    PIL.Image.new('RGB', size).save(folder / 'images/0.png', exif=exif)
    _, data = inspect(folder)
    assert data.modes[f'RGB (turned upright, EXIF {orientation}) image, L mask'] == 1


@pytest.mark.parametrize('mode', ['L', 'P', '1'])
@pytest.mark.parametrize('orientation', [3, 6, 7])
def test_a_mask_that_its_exif_turns_like_its_image(tmp_path, orientation, mode):
    """Whoever copies the EXIF of a photograph into its mask has both turned: the mask is read as upright as its image."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    exif = PIL.Image.Exif()
    exif[274] = orientation
    shown = np.zeros((16, 4), np.uint8)
    shown[:5, :3] = 1
    picture = PIL.Image.fromarray(shown * 255).convert(mode)
    stored = {3: 'ROTATE_180', 6: 'ROTATE_90', 7: 'TRANSVERSE'}[orientation]       # the way back
    picture.transpose(PIL.Image.Transpose[stored]).save(folder / 'masks/0.png', exif=exif)
    rgb = PIL.Image.fromarray(shown * 255).convert('RGB').transpose(PIL.Image.Transpose[stored])
    rgb.save(folder / 'images/0.png', exif=exif)
    config, data = inspect(folder, mask_values='nonzero')
    row = [os.fsdecode(path).endswith('0.png') for path in data.pairs.images].index(True)
    codes = train_unet.read_mask(os.fsdecode(data.pairs.masks[row]), config)
    np.testing.assert_array_equal(codes > 0, shown > 0)
    np.testing.assert_array_equal(train_unet.read_image(os.fsdecode(data.pairs.images[row]), config)[..., 0] > 0, shown)


@pytest.mark.parametrize('of_image', [1, 8])
def test_a_mask_that_its_exif_turns_otherwise_is_refused(tmp_path, of_image):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    exif = PIL.Image.Exif()
    for name, size, orientation in (('images', (16, 16), of_image), ('masks', (16, 16), 6)):
        exif[274] = orientation
        PIL.Image.new('L', size).save(folder / name / '0.png', exif=exif)
    with pytest.raises(DataError, match='masks/0.png: carries a rotation'):
        inspect(folder)


def test_a_folder_goes_with_its_twin(tmp_path):
    """Three videos with equal file names, of which two have masks."""
    fill(tmp_path / 'set', [f'JPEGImages/{video}/{n:02}.png' for video in ('bmx', 'frog', 'worm') for n in range(8)],
         [f'GroundTruth/{video}/{n:02}.png' for video in ('frog', 'worm') for n in range(8)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines and not any('bmx' in line for line in lines)
    for line in lines:
        _, data = inspect(tmp_path / 'set', **typed(line))
        found = partners(data, tmp_path / 'set').items()
        assert found and all(Path(image).parts[1:] == Path(mask).parts[1:] for image, mask in found)


def test_a_run_inside_the_data_is_no_data(tmp_path):
    fill(tmp_path / 'set', [f'x{n}.png' for n in range(4)], [f'x{n}_mask.png' for n in range(4)])
    for name in ('curves.png', 'samples.png', 'config.py', 'log.txt'):
        save(tmp_path / f'set/out/{name}.png', np.zeros((8, 8)))
        (tmp_path / f'set/out/{name}.png').rename(tmp_path / f'set/out/{name}')
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.images) == 4 and not data.pairs.notes


def test_the_demo_is_drawn_again_when_its_files_are_gone(tmp_path):
    folder = train_unet.write_demo(tmp_path / 'demo', num_train=2, num_val=1)
    shutil.rmtree(folder)
    assert len(list(train_unet.write_demo(folder, num_train=2, num_val=1).glob('*/*/*.png'))) == 6


def test_files_without_a_partner_do_not_hide_broken_ones(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=8)
    (folder / 'masks/0.png').unlink()
    (folder / 'images/1.png').write_bytes(b'')
    save(folder / 'masks/2.png', np.zeros((5, 9)))
    told = str(ask(folder))
    assert re.search(r'image without a mask: .*images/0.png', told) and re.search(r'images/1.png: .*empty', told)
    assert re.search(r'images/2.png: is 16 x 4 pixels, its mask .* 9 x 5', told)


def test_masks_of_minus_one_and_one_get_a_line_with_a_background(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for path in sorted((folder / 'masks').iterdir()):
        np.save(path.with_suffix('.npy'), np.asarray(PIL.Image.open(path)).astype(np.int16) * 2 - 1)
        path.unlink()
    line = offered(ask(folder), 'mask_values=')
    _, data = inspect(folder, **typed(line))
    assert line == 'mask_values="{-1: 0, 1: 1}"' and data.shares.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize('folder', ['img_{n}_json', 'image_{n}', 'photo {n}', 'train_{n}'])
def test_a_folder_for_each_image_may_sound_like_images_masks_or_a_split(tmp_path, folder):
    """As labelme names them; the two pictures in each belong together."""
    pairs = {f'{folder}/img.png'.format(n=n): f'{folder}/label.png'.format(n=n) for n in range(12)}
    fill(tmp_path / 'set', [*pairs], [*pairs.values()])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == pairs


def test_species_are_not_offered_the_masks_of_others(tmp_path):
    """Every species has pictures of the same names: only its own folder of masks belongs to it."""
    for kind in ('Trout', 'Shrimp', 'Bream'):
        fill(tmp_path / 'set', [f'Fish/{kind}/{kind}/{n}.png' for n in range(4)],
             [f'Fish/{kind}/{kind} GT/{n}.png' for n in range(4)])
    lines = re.findall('images="(.*?)" masks="(.*?)"', str(ask(tmp_path / 'set')))
    assert lines and all(mask == f'{image} GT' for image, mask in lines)


def test_colour_masks_of_16_bits_are_read_whole_or_refused(tmp_path):
    """Pillow would cut 3 to 0. Those that hold 8 bits twice (51400 is 200 x 257) lose nothing."""
    mask = np.zeros((8, 8, 3), np.uint16)
    for value in (3, 257 * 200, 1000):
        mask[2:5] = value
        cv2.imwrite(str(tmp_path / f'{value}.png'), mask)
    for value, colour in ((3, 0x030303), (257 * 200, 0xc8c8c8)):
        assert set(np.unique(codes_of(tmp_path / f'{value}.png'))) == {train_unet.COLOUR, train_unet.COLOUR + colour}
    with pytest.raises(DataError, match='1000.png: holds colours beyond 8 bits'):
        codes_of(tmp_path / '1000.png')


def test_bright_is_not_offered_where_nothing_is_dark(tmp_path):
    for n in range(4):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        save(tmp_path / f'set/masks/{n}.png', np.where(np.arange(64).reshape(8, 8) < 20, 128, 255))
    said = str(ask(tmp_path / 'set'))
    assert "type mask_values" in said and '>127' not in said


def test_masks_of_other_frames_do_not_crowd_out_those_that_are_meant(tmp_path):
    """NVIDIA's Replicator writes all kinds into one folder, a depth map as .npy among them."""
    for n in range(10):
        fill(tmp_path / 'set', [f'rgb_{n:04}.png'], [f'{kind}_segmentation_{n:04}.png'
                                                     for kind in ('semantic', 'instance')])
        np.save(tmp_path / f'set/distance_to_camera_{n:04}.npy', np.random.default_rng(n).random((8, 8)))
    assert 'mask_pattern="semantic_segmentation{stem}.png"' in str(ask(tmp_path / 'set'))


@pytest.mark.parametrize('seed', range(5))
def test_codes_become_the_classes_that_a_plain_loop_gives(seed):
    draw = np.random.default_rng(seed)
    some = [-3, -1, 0, 1, 7, 255, 40_000, train_unet.COLOUR - 1, train_unet.COLOUR, train_unet.COLOUR + 0x0a0a0a, 2 * train_unet.COLOUR - 1]
    table = {code: int(draw.integers(0, 256)) for code in some} | {10**12: 1, -10**12: 2}      # no mask holds the last
    codes = draw.choice(some, (9, 11)).astype(np.int32)
    assert train_unet.Coding(table).encode(codes).tolist() == [[table[code] for code in row] for row in codes.tolist()]
    codes[4, 5] = 8
    with pytest.raises(train_unet.DataError, match='holds the value 8, which has no meaning'):
        train_unet.Coding(table).encode(codes, 'x.png')


def test_a_threshold_is_of_the_brightest_channel_and_leaves_out_only_grey():
    codes = np.array([[-1, 255, 90, 200, *(train_unet.COLOUR + rgb for rgb in (0xffffff, 0x00ff00, 0x101010))]])
    above, below = (train_unet.Coding(None, 127, below=below, ignored=255).encode(codes) for below in (False, True))
    assert above.tolist() == [[255, 255, 0, 1, 255, 1, 0]] and below.tolist() == [[255, 255, 1, 0, 255, 0, 1]]


def test_a_threshold_of_a_large_grey_mask_does_without_its_colours():
    """A mask of 100 million pixels would take 2 GB more."""
    codes = np.zeros((1000, 1000), np.int32)
    tracemalloc.start()
    train_unet.Coding(None, 127).encode(codes)
    assert tracemalloc.get_traced_memory()[1] < 4 * codes.nbytes
    tracemalloc.stop()


def split_sizes(data):
    return [len(data.pairs.rows(split)) if np.any(data.pairs.splits == number) else 0
            for number, split in enumerate(train_unet.SPLITS)]


def test_the_first_word_of_all_names_is_their_split(tmp_path):
    stems = [f'{kind}_{n}' for kind in ('train', 'testA', 'testB') for n in range(5)]
    fill(tmp_path, [f'{stem}.bmp' for stem in stems], [f'{stem}_anno.bmp' for stem in stems])
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [4, 1, 10] and names_of(data, 'test') == set(stems[5:])
    assert 'the images are split by the first word of their names' in data.notes
    fill(tmp_path, ['other_1.bmp'], ['other_1_anno.bmp'])              # not all of them: then it is no split
    assert split_sizes(inspect(tmp_path)[1]) == [13, 3, 0]


@pytest.mark.parametrize('line', ['{}', '{}.png', 'images/{}.png', 'images/{0}.png masks/{0}.png'])
def test_text_files_that_list_every_image_are_its_split(tmp_path, line):
    stems = [f'photo {n}' if line == '{}' else f'photo_{n}' for n in range(12)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'masks/{stem}.png' for stem in stems])
    parts = {'train': stems[:6], 'val': stems[6:9], 'test': stems[9:], 'trainval': stems[:9]}
    folder = tmp_path / 'ImageSets' / 'Segmentation'
    folder.mkdir(parents=True)
    for name, part in parts.items():
        mark = '\ufeff' * (name == 'val')                              # as some editors write it
        (folder / f'{name}.txt').write_text(mark + '\n'.join(line.format(stem) for stem in part) + '\n\n', 'utf-8')
    other = tmp_path / 'ImageSets' / 'Main'                            # another task, with images of its own
    other.mkdir()
    (other / 'train.txt').write_text('\n'.join([*stems[4:], *'abcdefghijklmn']))
    (other / 'val.txt').write_text('\n'.join(stems[:4]))
    data = inspect(tmp_path)[1]
    assert [names_of(data, part) for part in ('train', 'val', 'test')] == [set(parts[p]) for p in ('train', 'val', 'test')]
    told = [note for note in data.notes if 'text files' in note or '.txt' in note]
    assert told == ['the images are split by the text files in ImageSets/Segmentation']
    (folder / 'val.txt').write_text('\n'.join(stems[5:9]))             # one of train too
    (other / 'val.txt').unlink()
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [10, 2, 0]
    told = 'ignored 5 files, *.txt, which do not list every image once: ImageSets/Main/train.txt, ...'
    assert [note for note in data.notes if '.txt' in note] == [told]


@pytest.mark.parametrize('train, val', [('trainval', 'test'), ('trn', 'val'), ('train', 'eval')])
def test_text_files_of_other_names_are_its_split_too(tmp_path, train, val):
    """The Oxford pets come with trainval.txt and test.txt, Aeroscapes with trn.txt and val.txt."""
    stems = [f'pug_{n}' for n in range(12)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'annotations/trimaps/{stem}.png' for stem in stems])
    (tmp_path / f'annotations/{train}.txt').write_text('\n'.join(f'{stem} 1 1 1' for stem in stems[:8]))
    (tmp_path / f'annotations/{val}.txt').write_text('\n'.join(f'{stem} 1 1 1' for stem in stems[8:]))
    (tmp_path / 'annotations/list.txt').write_text('\n'.join(stems))
    data = inspect(tmp_path)[1]
    assert names_of(data, 'test' if val == 'test' else 'val') == set(stems[8:])
    assert split_sizes(data) == ([6, 2, 4] if val == 'test' else [8, 4, 0])


def test_a_text_file_for_validation_alone_leaves_the_others_for_training(tmp_path):
    """fastai's camvid comes with valid.txt, sets of scenes with test.txt alone."""
    stems = [f'Seq05VD_f{n:05}' for n in range(10)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'labels/{stem}_P.png' for stem in stems])
    (tmp_path / 'valid.txt').write_text('\n'.join(f'{stem}.png' for stem in stems[7:]))
    assert names_of(inspect(tmp_path)[1], 'val') == set(stems[7:])
    (tmp_path / 'valid.txt').rename(tmp_path / 'test.txt')
    data = inspect(tmp_path)[1]
    assert names_of(data, 'test') == set(stems[7:]) and split_sizes(data) == [6, 1, 3]


@pytest.mark.parametrize('names', [['2', '5'], ['S2_2', 'another']])
def test_a_text_file_for_validation_alone_that_names_strangers_is_no_split(tmp_path, names):
    """Two digits are not S2_1 without what the others share, nor is the list of another set that of this one."""
    fill(tmp_path, [f'images/S2_{n}.png' for n in range(1, 11)], [f'masks/S2_{n}.png' for n in range(1, 11)])
    (tmp_path / 'val.txt').write_text('\n'.join(names))
    data = inspect(tmp_path)[1]
    assert split_sizes(data)[:2] == [8, 2] and 'ignored val.txt' in data.notes


@pytest.mark.parametrize('name', ['{}_img', 'S2_{}', 'S2_{}_img'])
def test_text_files_may_list_names_without_what_all_of_them_share(tmp_path, name):
    """As mmsegmentation's lists do, which leave the suffix out."""
    stems = [f'{n}' for n in range(12)]
    fill(tmp_path, [f'imgs/{name.format(stem)}.png' for stem in stems],
         [f'gts/{name.format(stem)}_gt.png' for stem in stems])
    for split, part in (('train', stems[:8]), ('val', stems[8:])):
        (tmp_path / f'{split}.txt').write_text('\n'.join(part))
    assert names_of(inspect(tmp_path)[1], 'val') == {name.format(stem) for stem in stems[8:]}


@pytest.mark.parametrize('image, mask', [
    ('images/{}.png', 'images/{}.png___fuse.png'),                     # what SuperAnnotate exports
    ('skin_images/{}_orig.png', 'skin_images/{}_contour.png'),
    ('images/render/render{}.png', 'images/clean/clean{}.png')])
def test_all_in_folders_that_are_named_images_gets_its_patterns(tmp_path, image, mask):
    for n in range(6):
        save(tmp_path / image.format(f'D{n}'), np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
        save(tmp_path / mask.format(f'D{n}'), np.eye(32) * 255)
    save(tmp_path / 'other_images' / 'portrait.png', np.zeros((8, 8, 3)))
    line, = typed_lines(ask(tmp_path))
    assert partners(inspect(tmp_path, **typed(line))[1], tmp_path) == {
        image.format(f'D{n}'): mask.format(f'D{n}') for n in range(6)}


def test_no_mask_is_offered_as_an_image_where_there_are_photographs(tmp_path):
    """The Dresden set of surgery: photographs and masks in one folder, more masks by each rater below."""
    for n in range(6):
        place = tmp_path / f'{n // 2:02}'
        save(place / f'image{n % 2:02}.png', np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
        for folder in ('', 'anno_1', 'anno_2', 'merged'):
            save(place / folder / f'mask{n % 2:02}.png', np.eye(32) * 255)
    assert not typed_lines(ask(tmp_path))


def test_a_folder_named_gt_images_is_one_of_masks(tmp_path):
    """Labeled Faces in the Wild: 2,927 of 13,233 photographs have masks, in parts_lfw_funneled_gt_images/."""
    for n in range(6):
        save(tmp_path / f'faces/{n}.png', np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
    for n in range(3):
        save(tmp_path / f'parts_gt_images/{n}.png', np.eye(32) * 255)
    line, = typed_lines(ask(tmp_path))
    assert line == 'images="faces" masks="parts_gt_images" skip_unpaired=True'


def test_masks_below_a_folder_named_for_images_are_offered(tmp_path):
    """KITTI-360: everything of the first camera lies in image_00/."""
    for n in range(6):
        place = f'2013_05_28_drive_{n % 2:04}_sync/image_00'
        save(tmp_path / f'raw/{place}/data_rect/{n:06}.png', np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
        for kind in ('semantic', 'instance'):
            save(tmp_path / f'semantics/train/{place}/{kind}/{n:06}.png', np.eye(32))
    line, = typed_lines(ask(tmp_path))
    paired = partners(inspect(tmp_path, **typed(line))[1], tmp_path)
    assert len(paired) == 6 and all('/data_rect/' in i and '/semantic/' in m and i[-10:] == m[-10:]
                                    for i, m in paired.items())


def test_masks_that_torch_wrote_have_their_channel_first(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    mask = np.arange(96).reshape(1, 6, 16) % 3
    for n in range(3):
        (folder / f'masks/{n}.png').unlink()
        np.save(folder / f'masks/{n}.npy', mask)
    config, data = inspect(folder)
    assert np.array_equal(mask_of(data, config, '0'), mask[0])


def test_images_of_8_bits_beside_those_of_16_are_told(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    told = lambda: [note for note in inspect(folder)[1].notes if '8 bits' in note]
    assert not told()
    PIL.Image.fromarray(np.full((6, 16), 4095, np.uint16)).save(folder / 'images/0.png')
    assert told()[0].startswith('some images have 8 bits, others 16, all of which become 0 to 1')


def test_ids_of_objects_in_three_masks_are_asked_about(tmp_path):
    for number, count in enumerate([5, 11, 16]):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        save(tmp_path / f'masks/{number}.png', np.arange(16 * 16).reshape(16, 16) % (count + 1))
    assert typed(offered(ask(tmp_path), 'mask_values=')) == {'mask_values': 'nonzero'}


@pytest.mark.parametrize('folder', ['segm', 'segmaps', 'GTmaps'])
def test_more_names_of_folders_of_masks(tmp_path, folder):
    """DeepFashion, particles under an electron microscope, clouds."""
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'{folder}/{n}.png' for n in range(4)])
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_text_files_beside_folders_that_tell_the_split_are_named(tmp_path):
    fill(tmp_path, [f'images/{split}/{n}.png' for split in ('train', 'val') for n in range(4)],
         [f'masks/{split}/{n}.png' for split in ('train', 'val') for n in range(4)])
    for name in ('train.txt', 'val.txt'):
        (tmp_path / name).write_text('0\n1\n2\n3\n')
    assert inspect(tmp_path)[1].notes == ['ignored 2 files, *.txt, as folders tell the split: train.txt, ...']


def test_what_lies_outside_the_folders_that_were_typed_is_told(tmp_path):
    fill(tmp_path, [f'{kind}/images/{n}.png' for kind in ('a', 'b') for n in range(4)],
         [f'{kind}/masks/{n}.png' for kind in ('a', 'b') for n in range(4)])
    notes = inspect(tmp_path, images='a/images', masks='a/masks')[1].notes
    assert 'ignored 8 files, outside of images= and masks=: 0.png, ...' in notes
    assert not any('outside of' in note for note in inspect(tmp_path, images='*/images', masks='*/masks')[1].notes)


def test_ids_of_objects_are_offered_as_foreground_first(tmp_path):
    for number, count in enumerate([9, 6, 4, 3, 2, 2]):                # each mask begins anew with 1
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        save(tmp_path / f'masks/{number}.png', np.arange(16 * 16).reshape(16, 16) % (count + 1))
    save(tmp_path / 'images/9.png', np.zeros((16, 16, 3)) + 50)
    save(tmp_path / 'masks/9.png', np.where(np.arange(256).reshape(16, 16) % 13 == 12, 14, 0))
    assert typed(offered(ask(tmp_path), 'mask_values=')) == {'mask_values': 'nonzero'}


def test_pictures_of_the_masks_are_not_offered_as_masks(tmp_path):
    for folder, prefix in (('rawimages', ''), ('groundtruth', ''), ('visualized_groundtruth', 'Visualized_')):
        names = [f'dataset/{folder}/{prefix}{n}.png' for n in range(5)]
        fill(tmp_path, *((names, []) if 'raw' in folder else ([], names)))
    error = ask(tmp_path)
    assert '    images="dataset/rawimages" masks="dataset/groundtruth"   (5 pairs)' in error.problems


@pytest.mark.parametrize('train, val', [('traindata', 'valdata'), ('trainingset', 'validationset'),
                                        ('train', 'validset'), ('trainsplit', 'devsplit')])
def test_words_that_hold_a_split_and_more_tell_the_split(tmp_path, train, val):
    places = [f'{train}/{{}}/{n}.png' for n in range(8)] + [f'{val}/{{}}/{n}.png' for n in range(8, 12)]
    fill(tmp_path, *([place.format(kind) for place in places] for kind in ('images', 'masks')))
    assert split_sizes(inspect(tmp_path)[1]) == [8, 4, 0]


def test_splits_and_roles_written_as_one_word_are_told_apart(tmp_path):
    places = [f'training{{}}/{n}.png' for n in range(8)] + [f'validation{{}}/{n}.png' for n in range(8, 12)]
    fill(tmp_path, *([place.format(kind) for place in places] for kind in ('images', 'masks')))
    assert split_sizes(inspect(tmp_path)[1]) == [8, 4, 0]


def test_letters_of_a_site_or_patient_are_no_split(tmp_path):
    """TS is a hospital here; beside patients of two letters VAL may be one, which is told."""
    places = ('TCGA-CS-4941', 'TCGA-TS-A7P1', 'TCGA-HT-7616')
    fill(tmp_path / 'sites', *([f'{p}/{p}_{n}{end}.png' for p in places for n in range(4)] for end in ('', '_mask')))
    assert split_sizes(inspect(tmp_path / 'sites')[1]) == [10, 2, 0]
    places = ('AB', 'CD', 'TS')
    fill(tmp_path / 'people', *([f'{p}/{p}_{n}{end}.png' for p in places for n in range(4)] for end in ('', '_mask')))
    note, *_ = inspect(tmp_path / 'people')[1].notes
    assert note.startswith('8 images, such as ') and note.endswith('AB_0.png, are in no split by name: they are split '
                                                                   'by chance')


def test_a_folder_for_each_image_may_tell_its_split(tmp_path):
    folders = [f'{"train" if n < 8 else "val"}_{n:03d}' for n in range(12)]
    fill(tmp_path, *([f'{folder}/{name}.png' for folder in folders] for name in ('image', 'mask')))
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [8, 4, 0]
    assert all(os.path.dirname(image) == os.path.dirname(mask) for image, mask in partners(data, tmp_path).items())


@pytest.mark.parametrize('names, line', [([f'scan.v2.{n:03d}' for n in range(12)], '{}'),
                                         ([f'{p}/{n}' for p in 'ABC' for n in range(4)], 'images/{}.png'),
                                         ([f'{p}/{n}' for p in 'ABC' for n in range(4)], './{}')])
def test_lists_of_a_split_may_hold_dots_and_folders(tmp_path, names, line):
    fill(tmp_path, *([f'{kind}/{name}.png' for name in names] for kind in ('images', 'masks')))
    for split, part in (('train', names[:8]), ('val', names[8:])):
        (tmp_path / f'{split}.txt').write_text('\n'.join(map(line.format, part)))
    data = inspect(tmp_path)[1]
    rows = {os.path.relpath(os.fsdecode(data.pairs.images[row]), tmp_path / 'images') for row in data.pairs.rows('val')}
    assert rows == {f'{name}.png' for name in names[8:]}


def test_parts_of_a_name_that_changed_their_order_pair_nothing(tmp_path):
    """x0_y1 is not y0_x1."""
    cells = [(x, y) for x in range(4) for y in range(4)]
    fill(tmp_path, [f'images/x{x}_y{y}.png' for x, y in cells], [f'masks/y{y}_x{x}.png' for x, y in cells])
    assert '0 pairs were found' in ask(tmp_path).problems


def test_two_numbers_that_both_fit_pair_nothing(tmp_path):
    times = [3, 1, 4, 0, 2]
    fill(tmp_path, [f'images/frame_{n}_t{t}.png' for n, t in enumerate(times)],
         [f'masks/frame{n}_mask.png' for n in range(5)])
    assert '0 pairs were found' in ask(tmp_path).problems


def test_a_link_to_a_folder_of_the_set_is_named(tmp_path, caplog):
    fill(tmp_path, *([f'{kind}/{split}/{n}.png' for split in ('train', 'test') for n in range(4)]
                     for kind in ('images', 'masks')))
    (tmp_path / 'images' / 'val').symlink_to('test')
    (tmp_path / 'masks' / 'val').symlink_to('test')
    inspect(tmp_path)
    assert f'ignored {tmp_path}/images/val: it is the same folder as {tmp_path}/images/test' in caplog.text


@pytest.mark.parametrize('inside', [True, False])
@pytest.mark.parametrize('again', [os.symlink, shutil.copy])
def test_links_and_copies_that_validate_on_what_is_trained_on_are_told(tmp_path, inside, again):
    data, whole = tmp_path / 'set', tmp_path / ('set/all' if inside else 'all')
    for n, kind in itertools.product(range(8), ('images', 'masks')):
        save(whole / f'{kind}/{n}.png', np.random.default_rng((n, len(kind))).integers(0, 2, (32, 32), np.uint8))
    for split, rows in (('train', range(6)), ('val', range(6, 8))):
        for kind in ('images', 'masks'):
            (data / split / kind).mkdir(parents=True)
            for n in rows:
                again(whole / kind / f'{n}.png', data / split / kind / f'{n}.png')
    told = [note for note in inspect(data)[1].notes if 'are trained on too' in note]
    assert told == [f'2 images of validation or test, such as {data}/val/images/6.png, are trained on too, as '
                    f'{whole}/images/6.png: their scores flatter'] * inside


@pytest.mark.parametrize('named', [True, False])
def test_another_draw_is_advised_only_where_chance_drew(tmp_path, named):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=6)
    save(folder / 'masks/0.png', np.arange(4).repeat(16).reshape(4, 16) % 3)
    if named:
        for kind, number in itertools.product(('images', 'masks'), range(6)):
            target = folder / kind / ('val' if number == 5 else 'train') / f'{number}.png'
            target.parent.mkdir(exist_ok=True)
            (folder / kind / f'{number}.png').rename(target)
    note, = [note for note in inspect(folder, num_classes=3)[1].notes if note.startswith('no validation mask has class 2')]
    assert ('another seed or val_fraction' in note) is not named


def test_foreground_in_validation_alone_is_told_of(tmp_path):
    for number in range(6):
        split = 'val' if number > 3 else 'train'
        save(tmp_path / f'{split}/images/{number}.png', np.zeros((32, 48, 3)))
        save(tmp_path / f'{split}/masks/{number}.png', block(255 * (split == 'val')))
    with pytest.raises(DataError) as caught:
        train_unet.train(data=str(tmp_path), **TINY)
    assert 'draw another split, with another seed or val_fraction' in str(caught.value)


def test_one_name_and_one_size_in_two_splits_is_no_copy(tmp_path):
    for seed, split in enumerate(('train', 'val')):
        for n in range(4):
            picture = np.random.default_rng((seed, n)).integers(0, 2, (32, 32, 3), np.uint8)
            save(tmp_path / f'images/{split}/{n}.tif', picture)
            save(tmp_path / f'masks/{split}/{n}.png', picture[..., 0])
    assert not [note for note in inspect(tmp_path)[1].notes if 'are trained on too' in note]


def test_fractions_in_masks_of_three_bands_are_refused(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{n}.npy', np.repeat(np.eye(8)[..., None] / 2, 3, axis=2))
    assert 'holds fractions' in str(ask(tmp_path))


@pytest.mark.parametrize('suffix', ['.png', '.gif'])
def test_palettes_whose_black_is_not_number_0_are_asked_about_by_colour(tmp_path, suffix):
    """What quantizes colours numbers them as they come: red is number 0 here, black number 1."""
    for n in range(6):
        shown = np.zeros((8, 8), int) if n > 3 else np.eye(8, dtype=int)
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        mask = PIL.Image.fromarray((1 - shown).astype(np.uint8), 'P')
        mask.putpalette([255, 0, 0, 0, 0, 0] if n < 4 else [0, 0, 0])
        (mask if n < 4 else PIL.Image.fromarray(shown.astype(np.uint8))).save(
            (tmp_path / 'masks').mkdir(exist_ok=True) or tmp_path / f'masks/{n}{suffix}')
    error = ask(tmp_path)
    assert "if only '#ff0000' is foreground type mask_values=\"{'#ff0000': 1}\"" in error.problems
    config, data = inspect(tmp_path, mask_values={'#ff0000': 1})
    for n in range(6):
        assert (mask_of(data, config, str(n)) == (n < 4) * np.eye(8)).all()


def test_palettes_that_number_their_colours_anew_are_refused(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{n}.png', np.arange(64).reshape(8, 8) % 3, 'P')
        with PIL.Image.open(tmp_path / f'masks/{n}.png') as mask:
            mask.putpalette([0, 0, 0, *([255, 0, 0, 0, 255, 0] if n % 2 else [0, 255, 0, 255, 0, 0])])
            mask.save(tmp_path / f'masks/{n}.png')
    error = ask(tmp_path)
    assert 'palette masks number their colours anew in each file' in error.problems
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values="{')))
    for n in range(4):                                                 # as black, green and red mean it
        numbers = np.arange(64).reshape(8, 8) % 3
        assert np.array_equal(mask_of(data, config, str(n)), np.array([[0, 1, 2], [0, 2, 1]])[n % 2][numbers])
    assert inspect(tmp_path, mask_values={0: 0, 1: 1, 2: 2})[1].coding.num_classes == 3


# --- what other programs write: the same pixels, however they are stored ---

CODES = np.random.default_rng(3).integers(0, 2, (9, 7)).astype(bool)


def codes_of(path):
    return train_unet.read_mask(str(path), train_unet.CONFIG)


def test_true_of_a_bool_tiff_is_true(tmp_path):
    """tifffile writes True as black, which Pillow shows as 0; a scan in black and white means its colours."""
    tifffile.imwrite(tmp_path / 'bool.tif', CODES)
    PIL.Image.fromarray(CODES).save(tmp_path / 'scan.tif', tiffinfo={262: 0}, compression='group4')
    for name in ('bool.tif', 'scan.tif'):
        assert (codes_of(tmp_path / name) == 255 * CODES).all()


def with_overview(path, pixels, **how):
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, **how)
        file.write(pixels[::2, ::2], subfiletype=1, **how)


@pytest.mark.parametrize('how', [
    {'photometric': 'miniswhite'}, {'photometric': 'separated', 'bands': 4},
    {'photometric': 'palette', 'colormap': np.arange(768, dtype=np.uint16).reshape(3, 256)[:, ::-1] * 85}],
    ids=['miniswhite', 'cmyk', 'palette'])
def test_an_overview_changes_nothing_about_an_image(tmp_path, how):
    bands = how.pop('bands', 1)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 6, bands)[:2 + (bands > 1)]).astype(np.uint8)
    tifffile.imwrite(tmp_path / 'plain.tif', pixels, **how)
    with_overview(tmp_path / 'overview.tif', pixels, **how)
    seen = [train_unet.read_image(str(tmp_path / f'{name}.tif'), train_unet.CONFIG) for name in ('plain', 'overview')]
    assert seen[0].shape == (8, 6, 3) and (seen[0] == seen[1]).all()


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_a_rotated_grey_tiff_is_turned_and_not_scrambled(tmp_path, dtype):
    pixels = np.arange(12 * 20, dtype=dtype).reshape(12, 20)
    tifffile.imwrite(tmp_path / 'x.tif', pixels, extratags=[(274, 'H', 1, 6, True)])
    seen = train_unet.read_array(str(tmp_path / 'x.tif'), {**train_unet.CONFIG, 'in_channels': 1})
    assert (seen == np.rot90(pixels, -1)).all()


@pytest.mark.parametrize('name, pixels, words', [
    ('deep.npy', np.array([[[1, 0, 0]], [[0, 256, 0]]], np.uint16), 'holds colours beyond 8 bits'),
    ('wide.npy', np.array([[[-1, 0, 0]], [[0, 2, 0]]], np.int32), 'holds colours beyond 8 bits'),
    ('planes.npy', np.eye(4, dtype=np.uint8).reshape(2, 2, 4), 'a mask of the shape .2, 2, 4.')])
def test_what_is_no_colour_of_a_mask_is_refused(tmp_path, name, pixels, words):
    np.save(tmp_path / name, pixels)
    with pytest.raises(DataError, match=words):
        codes_of(tmp_path / name)


def test_colours_of_16_bits_that_stand_for_8_are_read_as_these(tmp_path):
    colours = np.array([[[255, 255, 255], [255, 0, 255], [0, 1, 0]]], np.uint16) * 257
    tifffile.imwrite(tmp_path / 'x.tif', colours, photometric='rgb')
    assert (codes_of(tmp_path / 'x.tif') == train_unet.COLOUR + np.array([[0xffffff, 0xff00ff, 0x000100]])).all()


def test_a_deep_mask_that_says_it_is_rotated_is_refused(tmp_path):
    cv2.imwrite(str(tmp_path / 'x.png'), np.full((4, 6, 3), 65535, np.uint16))
    exif, content = PIL.Image.Exif(), (tmp_path / 'x.png').read_bytes()
    exif[274] = 3
    data = exif.tobytes().removeprefix(b'Exif\0\0')
    chunk = b'eXIf' + data
    content = content[:33] + len(data).to_bytes(4, 'big') + chunk + zlib.crc32(chunk).to_bytes(4, 'big') + content[33:]
    (tmp_path / 'x.png').write_bytes(content)
    with pytest.raises(DataError, match='carries a rotation'):
        codes_of(tmp_path / 'x.png')


def test_a_portable_pixmap_of_16_bits_keeps_them(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 65535, (4, 5, 3)).astype('>u2')
    (tmp_path / 'x.ppm').write_bytes(b'P6 5 4 65535\n' + pixels.tobytes())
    config = {**train_unet.CONFIG, 'image_dtype': 'float32'}
    assert np.allclose(train_unet.read_image(str(tmp_path / 'x.ppm'), config), pixels / 65535)
    assert train_unet.image_dtype_of(train_unet.read_header(str(tmp_path / 'x.ppm'), config)[2]) == 'uint16'


def test_pixels_of_no_data_are_named(tmp_path):
    heights = np.random.default_rng(0).random((8, 8)).astype(np.float32)
    for name, tag in (('none', None), ('whole', '-9999'), ('rim', '-9999')):
        heights[0] = -9999 if name == 'rim' else heights[0]
        tifffile.imwrite(tmp_path / f'{name}.tif', heights, extratags=[(42113, 's', 0, tag, True)] if tag else [])
    config = {**train_unet.CONFIG, 'in_channels': 1, 'image_dtype': 'float32'}
    for name in ('none', 'whole'):
        train_unet.read_image(str(tmp_path / f'{name}.tif'), config)
    with pytest.raises(DataError, match='rim.tif: holds pixels of no data .-9999, GDAL_NODATA'):
        train_unet.read_image(str(tmp_path / 'rim.tif'), config)


def test_lit_pixels_of_a_bool_array_are_grey_in_grey(tmp_path):
    lit = np.zeros((2, 2, 3), bool)
    lit[0, 0, 0] = True
    np.save(tmp_path / 'x.npy', lit)
    assert train_unet.read_image(str(tmp_path / 'x.npy'), {**train_unet.CONFIG, 'in_channels': 1}).max() == 76


def two_kinds(folder, first, second, masks=None):
    """Ten pictures, of which five are written by each function (path without suffix, pixels)."""
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32)).astype(np.uint8)
        (folder / 'images').mkdir(parents=True, exist_ok=True)
        (first if number % 2 else second)(folder / f'images/{number}', pixels)
        save(folder / f'masks/{number}.png', 255 * (pixels > 127))
    return folder


def as_png(path, pixels):
    save(path.with_suffix('.png'), pixels)


def as_float(top):
    return lambda path, pixels: tifffile.imwrite(path.with_suffix('.tif'), (pixels / 255 * top).astype(np.float32))


def test_images_of_two_scales_in_one_set_are_refused(tmp_path):
    for top in (1, 255):
        data, config = dataset(two_kinds(tmp_path / f'{top}', as_png, as_float(top)), in_channels=1)
        if top == 1:
            assert 0.4 < train_unet.image_statistics(data, config)[0][0] < 0.6
            continue
        with pytest.raises(DataError, match=r'goes up to 25.*, as it is stored as float or wide integers, while'):
            train_unet.image_statistics(data, config)


def test_images_stored_otherwise_than_those_trained_on_are_told(tmp_path, capsys, caplog):
    """float32 of 0 to 255 in training; the same pictures of 8 bits become 0 to 1."""
    folder = two_kinds(tmp_path / 'set', as_float(255), as_float(255))
    result = train_unet.train(data=str(folder), in_channels=1, **{**TINY, 'image_size': 32})
    two_kinds(tmp_path / 'other', as_png, as_png)
    says = "stored as uint8, what was trained on as float32; is the scale the same?"
    for command, told in ((['predict', str(folder / 'images')], 0), (['predict', str(tmp_path / 'other/images')], 1),
                          (['evaluate', f'data={tmp_path / "other"}'], 1)):
        caplog.clear()
        train_unet.main([command[0], str(result.run_dir), *command[1:]])
        assert caplog.text.count(says) == told


def palette_mask(path, codes, colours):
    picture = PIL.Image.fromarray(codes.astype(np.uint8))
    picture.putpalette([channel for colour in colours for channel in colour])
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def test_a_palette_cut_to_black_and_white_beside_numbers_is_asked_about(tmp_path):
    """Class 1 is white; in files without class 2 only black and white are left."""
    for number in range(10):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        codes = np.arange(64).reshape(8, 8) % (2 + number % 2)
        palette_mask(tmp_path / f'masks/{number}.png', codes,
                     [(0, 0, 0), (255, 255, 255), (255, 0, 0)][:2 + number % 2])
    line = offered(ask(tmp_path), 'mask_values=')
    _, data = inspect(tmp_path, **typed(line))
    assert data.coding.num_classes == 3 and train_unet.IGNORE not in data.classes


def test_masks_of_one_bit_beside_others_with_void_are_asked_about(tmp_path):
    (tmp_path / 'masks').mkdir()
    for number in range(10):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        codes = np.full((8, 8), 255)
        codes[:, :4] = (np.arange(32).reshape(8, 4) % 2) * (number % 2)
        if number % 2:
            save(tmp_path / f'masks/{number}.png', codes)
        else:                                                          # nothing but 0 and void
            PIL.Image.fromarray(codes > 0).save(tmp_path / f'masks/{number}.png')
    assert 'save all of them alike' in str(ask(tmp_path))


@pytest.mark.parametrize('noisy', [True, False])
def test_white_of_one_bit_is_that_of_eight(tmp_path, noisy):
    """Some masks were cut to one bit, others have soft edges: none of them must become all background."""
    draw = np.random.default_rng(0)
    for number in range(10):
        save(tmp_path / f'images/{number}.png', np.zeros((32, 32, 3)))
        codes = np.zeros((32, 32), int)
        codes[8:24, 8:24] = 255
        if number % 2:
            codes[8, 8:24] = draw.integers(1, 255, 16) if noisy else 254
            save(tmp_path / f'masks/{number}.png', codes)
        else:
            (tmp_path / 'masks').mkdir(exist_ok=True)
            PIL.Image.fromarray(codes > 0).save(tmp_path / f'masks/{number}.png')
    wish = {} if noisy else typed(offered(ask(tmp_path), 'mask_values=">127'))
    _, data = inspect(tmp_path, **wish)
    assert data.classes[1][1] == 10


def test_colours_of_the_palettes_of_other_masks_are_the_same_classes(tmp_path):
    """As annotation tools save them: most RGBA, some with a palette of these colours."""
    colours = [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    for number in range(10):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        picture = PIL.Image.fromarray((np.arange(64).reshape(8, 8) % 3).astype(np.uint8), 'P')
        picture.putpalette(sum(map(list, colours), []))
        (tmp_path / 'masks').mkdir(exist_ok=True)
        (picture if number % 3 else picture.convert('RGBA')).save(tmp_path / f'masks/{number}.png')
    config, data = inspect(tmp_path)
    assert data.coding.num_classes == 3 and {images for _, images in data.classes.values()} == {10}
    assert any('mean the same' in note for note in data.notes)
    masks = [data.coding.encode(train_unet.read_mask(tmp_path / f'masks/{n}.png', config)) for n in range(10)]
    assert all((mask == masks[1]).all() for mask in masks)
    for wish in ({'#000000': 0, '#800000': 1, '#008000': 1}, {0: 0, 1: 1, 2: 1}):
        _, data = inspect(tmp_path, mask_values=wish)
        assert data.classes[1][1] == 10 and data.classes[1][0] == 10 * 42


def test_white_of_16_bits_is_that_of_8_and_of_one(tmp_path):
    for number, top in enumerate([65535, 255, 1] * 4):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8, dtype=int) * top, {65535: 'I;16', 255: 'L', 1: '1'}[top])
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 2 and data.classes[1][1] == 12


def test_masks_of_one_bit_beside_colours_are_asked_about(tmp_path):
    """What makes files small cuts those of black and white to one bit: no line may tell its black from the others'."""
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        colours = np.array([[0] * 3, [255] * 3, [255, 0, 0]])
        save(tmp_path / f'masks/{number}.png', np.eye(8) if number % 2 else colours[np.arange(64).reshape(8, 8) % 3],
             '1' if number % 2 else None)
    assert 'save all of them alike' in str(ask(tmp_path))


def test_the_line_that_takes_all_but_0_takes_255_too(tmp_path):
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.array([0, 0, 127, 255])[np.arange(64).reshape(8, 8) % 4])
    assert 'type mask_values=nonzero ignore_index=None' in str(ask(tmp_path))
    _, data = inspect(tmp_path, **typed('mask_values=nonzero ignore_index=None'))
    assert data.shares.tolist() == [0.5, 0.5] and train_unet.IGNORE not in data.classes


def test_a_set_unpacked_anew_with_its_old_times_is_looked_at_again(tmp_path):
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.npy', np.eye(8, dtype=np.uint8) * 255)
    assert set(inspect(tmp_path)[1].values) == {0, 255}
    for path in (tmp_path / 'masks').glob('*.npy'):
        times, size = path.stat(), path.stat().st_size
        np.save(path, np.eye(8, dtype=np.uint8)[::-1])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_size == size
    assert set(inspect(tmp_path)[1].values) == {0, 1}


def test_inverted_masks_of_single_objects_get_no_line_that_inverts_their_union(tmp_path):
    for number in range(4):
        save(tmp_path / f'{number}/images/{number}.png', np.zeros((16, 16, 3)))
        for place in range(2):
            mask = np.full((16, 16), 255)
            mask[2 * place:2 * place + 4, :4] = 0                      # they overlap
            save(tmp_path / f'{number}/masks/{place}.png', mask)
    notes = ' '.join(inspect(tmp_path)[1].notes)
    assert 'are the masks inverted? If so invert the files' in notes and 'mask_values=' not in notes


def test_a_second_page_that_is_left_out_as_alpha_is_told(tmp_path):
    for number in range(6):
        (tmp_path / 'images').mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f'images/{number}.tif', np.zeros((2, 8, 8), np.uint8), photometric='minisblack')
        save(tmp_path / f'masks/{number}.png', 255 * np.eye(8))
    assert 'band 2 of the images is taken for alpha and left out; in_channels=2 takes it' in \
        inspect(tmp_path, in_channels=1)[1].notes


def test_empty_masks_of_one_bit_beside_black_and_white_ones_are_nothing_to_ask_about(tmp_path):
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8) * 255 * (number % 2), None if number % 2 else '1')
    assert inspect(tmp_path)[1].coding.table == {0: 0, 255: 1} | {
        train_unet.COLOUR: 0, train_unet.COLOUR + 0xffffff: 1}


def test_masks_coded_otherwise_than_in_training_are_told(tmp_path, caplog):
    """0, 1 and void in training; the other set holds void and 0 alone, which looks like black and white."""
    for name, top in (('set', 1), ('other', 255)):
        for number in range(8):
            codes = np.zeros((32, 32))
            codes[number:number + 9, :12], codes[30:] = top, 255
            save(tmp_path / f'{name}/images/{number}.png', np.zeros((32, 32, 3)))
            save(tmp_path / f'{name}/masks/{number}.png', codes)
    run = train_unet.train(data=str(tmp_path / 'set'), **{**TINY, 'num_epochs': 1}).run_dir
    for name, times in (('set', 0), ('other', 1)):
        caplog.clear()
        assert train_unet.main(['evaluate', str(run), f'data={tmp_path / name}']) == 0
        assert caplog.text.count('the masks are not coded as in training: 0 is background, 255 foreground; there: 0 is '
                                 'background, 1 foreground; 255 is ignored') == times


# --- masks as public sets have them ---------------------------------------------------


def with_masks(folder, masks, suffix='.png', palette=None):
    """A set of one image for each of these masks (H, W) or (H, W, 3); returns the folder."""
    for number, mask in enumerate(masks):
        save(folder / f'images/{number}.png', np.zeros((*mask.shape[:2], 3)) + number)
        picture = PIL.Image.fromarray(np.asarray(mask, np.uint8))
        if palette:
            picture.putpalette(palette)
        (folder / 'masks').mkdir(exist_ok=True)
        picture.save(folder / f'masks/{number}{suffix}')
    return folder


def block(value, row=4):
    """(32, 48) of 0 with a block of a value: a sixth of it."""
    mask = np.zeros((32, 48))
    mask[row:row + 16, 8:24] = value
    return mask


def test_black_and_white_bmp_of_eight_bits_is_read_whole(tmp_path):
    """Pillow 13 takes it for one bit per pixel."""
    folder = with_masks(tmp_path, [block(1, row) for row in range(4)], '.bmp', [0, 0, 0, 255, 255, 255])
    config, data = inspect(folder)
    assert data.shares.tolist() == pytest.approx([5 / 6, 1 / 6])
    assert (mask_of(data, config, '2') == block(1, 2)).all()
    picture = train_unet.read_image(folder / 'masks/3.bmp', config)    # an image of this kind is read likewise
    assert (picture[..., 0] == block(255, 3)).all()


@pytest.mark.parametrize('channels', [1, 3])
def test_ids_of_objects_are_asked_about_also_where_they_are_grey_colours(tmp_path, channels):
    masks = [np.zeros((32, 48)) for _ in range(6)]
    for count, mask in enumerate(masks, 2):
        for number in range(1, count + 1):
            mask[2:10, 5 * number:5 * number + 3] = number
    masks = [np.stack([mask] * 3, -1) if channels == 3 else mask for mask in masks]
    assert typed(offered(ask(with_masks(tmp_path, masks)), 'mask_values=')) == {'mask_values': 'nonzero'}


def test_a_palette_of_classes_that_ends_in_black_keeps_its_numbers(tmp_path):
    """Cityscapes as its users save it: 0 is purple; 255, which only some files hold, is black as all behind 7 are."""
    masks = [np.arange(8).repeat(6)[None].repeat(32, 0) for _ in range(4)]
    for mask in masks[::2]:
        mask[28:] = 255
    palette = bytes.fromhex('804080 f423e8 464646 66669c be9999 999999 faaa1e dcdc00')
    coding = inspect(with_masks(tmp_path, masks, palette=[*palette, *[0] * (768 - 24)]))[1].coding
    assert coding.words == 'class indices 0 to 7; 255 is ignored'


def test_two_classes_that_leave_out_most_of_the_picture_say_so(tmp_path):
    """A stray pixel of 1 beside the foreground 255."""
    masks = [block(255, row) for row in range(4)]
    for mask in masks:
        mask[0, 0] = 1
    folder = with_masks(tmp_path, masks)
    said = inspect(folder, num_classes=2)[1].coding.words
    assert said.endswith('1 foreground; 255 is ignored; if 255 is the foreground type mask_values="{255: 1}"')
    assert inspect(folder, **typed('mask_values="{255: 1}"'))[1].shares[1] == pytest.approx(1 / 6)


@pytest.mark.parametrize('settings, expected', [({}, '0 is background, 1 foreground; -9999 is ignored'),
                                                ({'mask_values': {1: 1}}, 'as mask_values says; 0 -> 0; -9999 is ignored')])
def test_numbers_below_zero_are_ignored(tmp_path, settings, expected):
    for number in range(4):
        mask = block(1, number)
        mask[:, 40:] = -9999
        save(tmp_path / f'images/{number}.png', np.zeros((32, 48, 3)))
        save(tmp_path / f'masks/{number}.npy', mask.astype(np.int16))
    data = inspect(tmp_path, **settings)[1]
    assert data.coding.words == expected and data.classes[255][0] == 4 * 32 * 8 and 255 in data.coding.table.values()


def test_what_mask_values_leaves_out_is_told(tmp_path):
    """REFUGE: cup 0, disc 128, all else 255."""
    masks = [255 - 127 * (block(1, row) > 0) for row in range(4)]
    for mask in masks:
        mask[10:14, 10:14] = 0
    words = inspect(with_masks(tmp_path, masks), mask_values={0: 1})[1].coding.words
    assert words == 'as mask_values says; 128 -> 0; 255 is ignored'


@pytest.mark.parametrize('channels', [1, 3])
def test_void_is_left_out_of_nonzero_also_where_it_is_a_grey_colour(tmp_path, channels):
    masks = [block(number, 4) + block(255, 24) for number in (1, 2, 3, 1)]
    masks = [np.minimum(mask, 255) for mask in masks]
    masks = [np.stack([mask] * 3, -1) if channels == 3 else mask for mask in masks]
    data = inspect(with_masks(tmp_path, masks), mask_values='nonzero')[1]
    assert data.coding.words == 'values above 0 are foreground; 255 is ignored'
    assert data.classes[255][0] == 4 * 8 * 16 and data.classes[1][0] == 4 * 16 * 16


def test_a_grey_gif_is_no_palette_of_classes(tmp_path):
    assert offered(ask(with_masks(tmp_path, [block(38, row) for row in range(4)], '.gif')), 'mask_values="{38') \
        == 'mask_values="{38: 1}"'


def test_jpeg_masks_are_offered_no_numbers_of_their_noise(tmp_path):
    text = str(ask(with_masks(tmp_path, [block(200, row) for row in range(4)], '.jpg')))
    assert 'mask_values="{0: 0, 200: 1}"' in text
    assert 'num_classes=' not in text and text.count('mask_values="{') == 1


def test_near_infrared_that_a_tiff_calls_alpha_is_told_of(tmp_path):
    for number in range(4):
        (tmp_path / 'images').mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f'images/{number}.tif', np.full((32, 48, 4), number, np.uint8), photometric='rgb',
                         extrasamples=['unassalpha'])
        save(tmp_path / f'masks/{number}.png', block(255))
    assert 'band 4 of the images is taken for alpha and left out; in_channels=4 takes it' in inspect(tmp_path)[1].notes
    assert not any('alpha' in note for note in inspect(tmp_path, in_channels=4)[1].notes)


def test_validation_images_of_another_scale_are_refused_by_name(tmp_path):
    """Training images of 8 bits become 0 to 1 beside floats; floats of 0 to 255 are none of theirs."""
    for number in range(8):
        split, suffix = ('train', 'png') if number < 6 else ('val', 'npy')
        image = np.random.default_rng(number).integers(0, 256, (32, 48, 3)).astype(np.float32)
        save(tmp_path / f'{split}/images/{number}.{suffix}', image)
        save(tmp_path / f'{split}/masks/{number}.png', block(255))
    with pytest.raises(DataError, match=r'val/images/6.npy: values around 1\d\d.* are far from all'):
        train_unet.train(data=str(tmp_path), **TINY)
