"""The data part: pairing, reading, what masks mean, augmenting, sampling, the demo and real sets.

Run: python -m pytest tests/test_data.py
"""
import json
import os
import re
import shlex
import shutil
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import scipy.io
import tifffile
import torch
from conftest import SHARED, TINY, draw_set

import train_unet
from train_unet import DataError, WindowSampler

CPU = torch.device('cpu')


# --- helpers -------------------------------------------------------------------------


def inspect(folder, **overrides):
    """-> (config, Data) as every command gets them."""
    config, _, _ = train_unet.resolve_config(None, {'data': str(folder), **overrides})
    return config, train_unet.inspect_data(config)


def dataset(folder, split='train', **overrides):
    """The SegmentationDataset that training would use, and its settled config."""
    wish = {**TINY, 'data': str(folder), **overrides}
    config, sources, _ = train_unet.resolve_config(None, wish)
    config, _, _, data, _ = train_unet.prepare(config, sources, CPU)
    return train_unet.SegmentationDataset(data, split, config, split == 'train'), config


def save(path, array, kind=None):
    """Write an array in the format of the suffix; `kind` is the Pillow mode it is put into."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.asarray(array)
    if path.suffix == '.npy':
        np.save(path, array)
    elif path.suffix == '.mat':
        scipy.io.savemat(path, {'groundtruth': array}, do_compression=True)
    elif kind in ('RGB', 'RGBA'):                                      # the array holds 0xRRGGBB
        parts = [array >> 16, array >> 8 & 255, array & 255, np.full_like(array, 255)]
        PIL.Image.fromarray(np.stack(parts[:len(kind)], -1).astype(np.uint8)).save(path)
    elif kind == 'P':
        picture = PIL.Image.fromarray(array.astype(np.uint8))
        picture.putpalette([7 * i % 256 for i in range(768)])          # also turns L into P
        picture.save(path)
    elif kind == '1':
        PIL.Image.fromarray(array.astype(bool)).save(path)
    elif kind == 'I;16':
        PIL.Image.fromarray(array.astype(np.uint16)).save(path)
    else:
        PIL.Image.fromarray(array.astype(np.uint8)).save(path)


def fill(folder, images, masks):
    """Images of one shade each, but for a pixel, and masks of 0 and 1 under these relative names."""
    for name in images:
        number = zlib.crc32(name.encode())
        picture = np.zeros((8, 8, 3)) + number % 200
        picture[0, 0] = number & 255, number >> 8 & 255, number >> 16 & 255
        save(folder / name, picture)
    for name in masks:
        save(folder / name, np.eye(8, dtype=int))


def partners(data, folder):
    """{image: mask} relative to the folder."""
    names = [[os.path.relpath(os.fsdecode(p), folder) for p in side]
             for side in (data.pairs.images, data.pairs.masks)]
    return dict(zip(*names))


def names_of(data, split):
    """Stems of one split."""
    return {Path(os.fsdecode(data.pairs.images[row])).stem for row in data.pairs.rows(split)}


def typed(text):
    """Overrides as the command line reads them from what an error message offers."""
    return train_unet.parse_overrides(shlex.split(text))[0]


def offered(error, start):
    """The first key=value in an error message that begins like `start`, quotes included."""
    words = re.findall(r"""\w+=(?:"[^"]*"|'[^']*'|[^\s"',;]+)""", str(error))
    found = [word for word in words if word.startswith(start)]
    assert found, f'{start} is not offered in:\n{error}'
    return found[0]


def ask(folder, **overrides):
    """The DataError of looking at a folder."""
    with pytest.raises(DataError) as caught:
        inspect(folder, **overrides)
    return caught.value


# --- pairing -------------------------------------------------------------------------

# name, image, mask (both templates), settings. {n} counts; {s} runs through the splits,
# and {k} counts within each.
LAYOUTS = [
    ('images and masks', 'images/{n:02d}.png', 'masks/{n:02d}.png', {}),
    ('other extensions and cases', 'Images/{n:02d}.JPG', 'MASKS/{n:02d}.PNG', {}),
    ('stems in another case', 'images/Site_{n}A.jpg', 'masks/site_{n}a.png', {}),
    ('images/train', 'images/{s}/{n}.jpg', 'masks/{s}/{n}.png', {}),
    ('train/images', '{s}/images/{n}.jpg', '{s}/masks/{n}.png', {}),
    ('same names in every split', '{s}/images/{k}.png', '{s}/masks/{k}.png', {}),
    ('train and trainannot', '{s}/{n:03d}.png', '{s}annot/{n:03d}.png', {}),
    ('train_images and train_masks', '{s}_images/{n}.png', '{s}_masks/{n}.png', {}),
    ('one folder, suffix _mask', '{n}.jpg', '{n}_mask.png', {}),
    ('one folder, x.jpg and x.png', 'all/x{n}.jpg', 'all/x{n}.png', {}),
    ('VOC', 'JPEGImages/2007_{n:06d}.jpg', 'SegmentationClass/2007_{n:06d}.png', {}),
    ('Cityscapes', 'leftImg8bit/{s}/ulm/ulm_{n:06d}_000019_leftImg8bit.png',
     'gtFine/{s}/ulm/ulm_{n:06d}_000019_gtFine_labelIds.png', {}),
    ('Carvana', 'train/car_{n:02d}.jpg', 'train_masks/car_{n:02d}_mask.gif', {}),
    ('ISIC', 'ISIC2018_Task1-2_{s}_Input/ISIC_{n:07d}.jpg',
     'ISIC2018_Task1_{s}_GroundTruth/ISIC_{n:07d}_segmentation.png', {}),
    ('ADE20K', 'images/{s}/ADE_{n:08d}.jpg', 'annotations/{s}/ADE_{n:08d}.png', {}),
    ('Oxford pets', 'images/pug_{n}.jpg', 'annotations/trimaps/pug_{n}.png', {}),
    ('Massachusetts', 'tiff/{s}/{n}_15.tiff', 'tiff/{s}_labels/{n}_15.tif', {}),
    ('DeepGlobe', 'train/{n}_sat.jpg', 'train/{n}_mask.png', {}),
    ('LGG, a folder per patient', 'TCGA_{n}/TCGA_{n}_1.tif', 'TCGA_{n}/TCGA_{n}_1_mask.tif', {}),
    ('Penn-Fudan', 'PNGImages/Ped{n:05d}.png', 'PedMasks/Ped{n:05d}_mask.png', {}),
    ('GlaS', 'train_{n}.bmp', 'train_{n}_anno.bmp', {}),
    ('nnU-Net in 2-D', 'imagesTr/case_{n:03d}_0000.png', 'labelsTr/case_{n:03d}.png', {}),
    ('CVC-ClinicDB', 'Original/{n}.tif', 'Ground Truth/{n}.tif', {}),
    ('numbered folders', 'images_{n}/scan.png', 'masks_{n}/scan.png', {}),
    ('numbered folders of masks alone (TNBC)', 'Slide_{n:02d}/{n:02d}_1.png', 'GT_{n:02d}/{n:02d}_1.png', {}),
    ('numbered folders of other names (Fish4Knowledge)', 'fish_image/fish_{n:02d}/fish_{n:04d}.png',
     'mask_image/mask_{n:02d}/mask_{n:04d}.png', {}),
    ('names with spaces', 'my images/a b {n}.png', 'my masks/a b {n}.png', {}),
    ('other letters', 'images/größe_图_{n}.png', 'masks/größe_图_{n}.png', {}),
    ('suffix of the image', 'images/{n}_image.png', 'masks/{n}.png', {}),
    ('suffix of the mask', 'images/{n}.png', 'masks/{n}_gt.png', {}),
    ('suffix of both', 'images/{n}_image.png', 'masks/{n}_annotation.png', {}),
    ('prefix of the image', 'images/img_{n}.png', 'masks/{n}.png', {}),
    ('prefix of the mask', 'images/{n}.png', 'masks/gt_{n}.png', {}),
    ('prefix of both', 'images/img_{n}.png', 'masks/mask_{n}.png', {}),
    ('numbers', 'raw/{n:02d}.tif', 'labels/labels{n:08d}.png', {}),
    ('folder per patient', 'images/p{n}/001.png', 'masks/p{n}/001.png', {}),
    ('patient first', 'p{n}/images/001.png', 'p{n}/masks/001.png', {}),
    ('mask_pattern', 'x/{n}.jpg', 'x/{n}_1stHO.png', {'mask_pattern': '{stem}_1stHO.png'}),
    ('both patterns', 'x/{n}_a.png', 'x/{n}_b.png',
     {'image_pattern': '{stem}_a.png', 'mask_pattern': '{stem}_b.png'}),
    ('images= and masks=', 'scans of May/{n}.png', 'drawn/by Ada/{n}.png',
     {'images': 'scans of May', 'masks': 'drawn/by Ada'}),
]


@pytest.mark.parametrize('image, mask, settings', [row[1:] for row in LAYOUTS],
                         ids=[row[0] for row in LAYOUTS])
def test_layout_is_paired(tmp_path, image, mask, settings):
    """Every image gets its own mask; twelve of them, so that 1 and 11 could be confused."""
    folder = tmp_path / 'set'
    split = [('train', 'val', 'test')[n % 3] for n in range(12)]
    parts = [dict(n=n, s=split[n], k=n // 3) for n in range(12)]
    expected = {image.format(**part): mask.format(**part) for part in parts}
    fill(folder, expected, expected.values())
    _, data = inspect(folder, **settings)
    assert partners(data, folder) == expected
    if '{s}' in image:
        found = [train_unet.SPLITS[i] for i in data.pairs.splits]
        assert all(s in name.lower() for s, name in zip(found, partners(data, folder)))


def test_words_of_splits(tmp_path):
    """training, validation and testing are train, val and test."""
    for split in ('training', 'Validation', 'testing'):
        fill(tmp_path / 'set', [f'images/{split}/{split}.jpg'], [f'masks/{split}/{split}.png'])
    _, data = inspect(tmp_path / 'set')
    found = [names_of(data, split) for split in train_unet.SPLITS]
    assert found == [{'training'}, {'Validation'}, {'testing'}]


def test_extensions_may_be_mixed(tmp_path):
    images = ['a.png', 'b.JPG', 'c.jpeg', 'd.bmp', 'e.tif', 'f.webp']
    masks = ['a.bmp', 'b.png', 'c.PNG', 'd.tiff', 'e.gif', 'f.png']
    fill(tmp_path / 'set', [f'images/{n}' for n in images], [f'masks/{n}' for n in masks])
    _, data = inspect(tmp_path / 'set')
    assert {Path(i).name: Path(m).name for i, m in partners(data, tmp_path / 'set').items()} == \
        dict(zip(images, masks))


def test_other_files_are_ignored_and_told(tmp_path):
    """Boxes, thumbnails and hidden files beside the masks."""
    folder = tmp_path / 'set'
    fill(folder, ['images/1.png', 'images/2.png'], ['masks/1.png', 'masks/2.png'])
    for name in ('masks/1.xml', 'masks/2.xml', 'images/Thumbs.db', 'masks/._1.png'):
        (folder / name).write_text('x')
    _, data = inspect(folder)
    assert len(data.pairs.images) == 2
    assert data.notes == ['ignored Thumbs.db', 'ignored ._1.png', 'ignored 2 files, *.xml: 1.xml, ...']


def test_second_annotator_is_left_out_by_patterns(tmp_path):
    """CHASE: x.jpg, x_1stHO.png and x_2ndHO.png in one folder."""
    fill(tmp_path / 'set', [f'{n}.jpg' for n in range(3)],
         [f'{n}_{who}HO.png' for n in range(3) for who in ('1st', '2nd')])
    _, data = inspect(tmp_path / 'set', image_pattern='{stem}.jpg', mask_pattern='{stem}_1stHO.png')
    assert partners(data, tmp_path / 'set') == {f'{n}.jpg': f'{n}_1stHO.png' for n in range(3)}


def test_two_folders_of_images_are_asked_for(tmp_path):
    """Pre and post (or S1 and S2) are not one set, though only the masks have a telling name."""
    fill(tmp_path / 'set', [f'{s}/{n}_{s}.png' for n in range(3) for s in ('pre', 'post')],
         [f'labels/{n}_label.png' for n in range(3)])
    error = ask(tmp_path / 'set')
    for folder in ('pre', 'post'):
        line = offered(error, 'images="' + folder) + ' ' + offered(error, 'masks=')
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert len(data.pairs.images) == 3


def test_folder_of_object_masks_is_united(tmp_path):
    """DSB-2018: one folder per image, one file per object."""
    folder = tmp_path / 'set'
    for n in range(3):
        fill(folder, [f'id{n}/images/id{n}.png'], [])
        for row in (1, 4):
            mask = np.zeros((8, 8))
            mask[row] = 255
            save(folder / f'id{n}/masks/{row}f{n}.png', mask)
    config, data = inspect(folder)
    mask = data.coding.encode(train_unet.read_mask(os.fsdecode(data.pairs.masks[0]), config))
    assert np.flatnonzero(mask.all(1)).tolist() == [1, 4] and mask.sum() == 16
    assert len(data.pairs.images) == 3


@pytest.mark.parametrize('has_split', [False, True])
def test_list_file(tmp_path, has_split):
    """Paths are relative to the list; the split column is optional."""
    folder = tmp_path / 'set'
    rows = [(f'deep/{n}.jpg', f'other {n + 1}.png', ('train', 'val')[n % 2]) for n in range(4)]
    fill(folder, [row[0] for row in rows], [row[1] for row in rows])
    lines = [','.join(row[:2 + has_split]) for row in [('image', 'mask', 'split'), *rows]]
    (folder / 'list.csv').write_text('\n'.join(lines))
    _, data = inspect(folder / 'list.csv', val_fraction=0.25)
    assert partners(data, folder) == {image: mask for image, mask, _ in rows}
    if has_split:
        assert names_of(data, 'val') == {'1', '3'}
    else:
        assert len(names_of(data, 'val')) == 1


def test_skip_unpaired_leaves_out_and_tells(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(5)],
         [f'masks/{n}.png' for n in range(3)])
    _, data = inspect(tmp_path / 'set', skip_unpaired=True)
    assert len(data.pairs.images) == 3
    assert 'skipped 2 images and 0 masks without a partner' in data.notes


@pytest.mark.parametrize('first, offered', [(0, False), (2, True)])
def test_images_from_1_and_masks_from_0_are_not_offered_shifted_by_one(tmp_path, first, offered):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(1, 11)], [f'masks/{n}.png' for n in range(first, 10)])
    assert ('skip_unpaired=True' in str(ask(tmp_path / 'set'))) is offered


# --- splitting -----------------------------------------------------------------------


def test_split_is_seeded(small_set, tmp_path):
    """The same seed holds out the same images, wherever the folder lies; another seed does not."""
    shutil.copytree(small_set, tmp_path / 'copy')
    draws = (small_set, 0), (small_set, 0), (tmp_path / 'copy', 0), (small_set, 1)
    first, again, moved, other = (names_of(inspect(folder, seed=seed)[1], 'val')
                                  for folder, seed in draws)
    assert first == again == moved != other


@pytest.mark.parametrize('fraction, count', [(0.25, 3), (0.5, 6), (0.01, 1)])
def test_val_fraction(small_set, fraction, count):
    _, data = inspect(small_set, val_fraction=fraction)
    assert (len(data.pairs.rows('val')), len(data.pairs.rows('train'))) == (count, 12 - count)


def test_groups_stay_on_one_side(tmp_path):
    names = [f'patient{p}_slice{n}' for p in range(5) for n in range(4)]
    fill(tmp_path / 'set', [f'images/{n}.png' for n in names], [f'masks/{n}.png' for n in names])
    for seed in range(5):
        _, data = inspect(tmp_path / 'set', group_pattern=r'^(patient\d+)_', seed=seed)
        sides = [{name.split('_')[0] for name in names_of(data, s)} for s in ('train', 'val')]
        assert not sides[0] & sides[1] and all(sides)


def test_test_images_stay_out_of_training(tmp_path):
    """Where only val is missing it is drawn from train, never from test."""
    for split, count in (('train', 6), ('test', 3)):
        fill(tmp_path / 'set', [f'{split}/images/{split}{n}.png' for n in range(count)],
             [f'{split}/masks/{split}{n}.png' for n in range(count)])
    _, data = inspect(tmp_path / 'set', val_fraction=0.5)
    assert names_of(data, 'test') == {'test0', 'test1', 'test2'}
    assert len(names_of(data, 'val')) == 3


# --- what masks mean -----------------------------------------------------------------

INDICES = [*range(19), 255]
# name, suffix, Pillow mode, stored values, the class ids they stand for, settings
CODINGS = [
    ('0 and 1', '.png', None, [0, 1], [0, 1], {}),
    ('0 and 255', '.png', None, [0, 255], [0, 1], {}),
    ('0, 1 and 255', '.png', None, [0, 1, 255], [0, 1, 255], {}),
    ('indices and 255', '.png', None, [0, 1, 2, 255], [0, 1, 2, 255], {}),
    ('Cityscapes train ids', '.png', None, INDICES, INDICES, {}),
    ('VOC palette', '.png', 'P', [*range(21), 255], [*range(21), 255], {}),
    ('150 classes', '.png', None, [*range(150)], [*range(150)],
     {'num_classes': 150}),
    ('-1 is ignored', '.npy', None, [0, 1, -1], [0, 1, 255], {}),
    ('sparse palette', '.png', 'P', [0, 5, 15, 255], [0, 5, 15, 255], {}),
    ('palette of two', '.png', 'P', [0, 1], [0, 1], {}),
    ('1 bit', '.png', '1', [0, 1], [0, 1], {}),
    ('1 bit TIFF', '.tif', '1', [0, 1], [0, 1], {}),
    ('colours', '.png', 'RGB', [0, 0x00ff00, 0xff0000], [0, 1, 2],
     {'mask_values': {'#000000': 0, '#00ff00': 1, '#FF0000': 2}}),
    ('colours with alpha', '.png', 'RGBA', [0, 0x800000], [255, 1],
     {'mask_values': {'#000000': 255, '#800000': 1}}),
    ('one colour named', '.png', 'RGB', [0, 0x00ff00, 0xff0000], [0, 0, 1],
     {'mask_values': {'#ff0000': 1}}),
    ('colours, nonzero', '.png', 'RGB', [0, 0x00ff00, 0xff0000], [0, 1, 1],
     {'mask_values': 'nonzero'}),
    ('black and white as RGB', '.png', 'RGB', [0, 0xffffff], [0, 1], {}),
    ('indices as RGB', '.png', 'RGB', [0, 0x010101, 0x020202], [0, 1, 2], {}),
    ('grey as RGB, named by value', '.png', 'RGB', [0, 0x808080, 0xffffff], [0, 0, 1],
     {'mask_values': {255: 1}}),
    ('grey as RGB, named by colour', '.png', 'RGB', [0, 0xffffff], [0, 1],
     {'mask_values': {'#000000': 0, '#ffffff': 1}}),
    ('only white named', '.png', 'RGB', [0, 0xffffff], [0, 1], {'mask_values': {'#ffffff': 1}}),
    ('16 bit', '.png', 'I;16', [0, 1, 2], [0, 1, 2], {}),
    ('16 bit ids, nonzero', '.tif', 'I;16', [0, 300, 700], [0, 1, 1], {'mask_values': 'nonzero'}),
    ('.npy', '.npy', None, [0, 1, 2], [0, 1, 2], {}),
    ('.mat', '.mat', None, [0, 1, 2], [0, 1, 2], {}),
    ('.mat of doubles', '.mat', float, [0.0, 1.0], [0, 1], {}),
    ('ignore_index', '.png', None, [*range(12)], [*range(11), 255], {'ignore_index': 11}),
    ('255 is a class', '.png', None, [0, 1, 255], [0, 1, 2],
     {'ignore_index': None, 'mask_values': {0: 0, 1: 1, 255: 2}}),
    ('the unnamed is background', '.png', None, [0, 3, 255], [0, 0, 1], {'mask_values': {255: 1}}),
    ('an ignored value stays so', '.png', None, [0, 3, 255], [0, 1, 255], {'mask_values': {3: 1}}),
    ('threshold', '.png', None, [0, 100, 200], [0, 0, 1], {'mask_values': '>127'}),
]


def coded_set(folder, values, suffix='.png', kind=None, count=3):
    """A set whose masks hold these values in equal stripes."""
    place = np.arange(2 * len(values)).repeat(16).reshape(-1, 16) // 2
    for n in range(count):
        save(folder / f'images/{n}.png', np.zeros((*place.shape, 3)))
        dtype = float if kind is float else np.int32
        save(folder / f'masks/{n}{suffix}', np.array(values, dtype)[place], kind)
    return folder, place


@pytest.mark.parametrize('suffix, kind, stored, meant, settings', [row[1:] for row in CODINGS],
                         ids=[row[0] for row in CODINGS])
def test_coding(tmp_path, suffix, kind, stored, meant, settings):
    folder, place = coded_set(tmp_path / 'set', stored, suffix, kind)
    config, data = inspect(folder, **settings)
    codes = train_unet.read_mask(os.fsdecode(data.pairs.masks[0]), config)
    assert (data.coding.encode(codes) == np.array(meant)[place]).all()
    assert data.coding.num_classes == max(2, 1 + max(m for m in meant if m != 255))
    counted = [m for m in meant if m != 255]
    assert data.shares[0] == pytest.approx(counted.count(0) / len(counted))


def test_jpeg_noise_is_thresholded(tmp_path):
    folder = draw_set(tmp_path / 'set', count=4)
    exact = {}
    for path in sorted((folder / 'masks').iterdir()):
        exact[path.stem] = np.array(PIL.Image.open(path)) > 0
        PIL.Image.open(path).save(path.with_suffix('.jpg'), quality=75)
        path.unlink()
    config, data = inspect(folder)
    assert len(data.values) > 16
    for path in data.pairs.masks:
        mask = data.coding.encode(train_unet.read_mask(os.fsdecode(path), config))
        assert (mask == exact[Path(os.fsdecode(path)).stem]).mean() > 0.97


UNCLEAR = [
    ('sparse grey values', [0, 32, 64, 96, 128], None, 'mask_values="{0:', 5),
    ('sparse, 255 is rare', [0, 40, 90] * 8 + [255], None, 'mask_values="{0:', 3),
    ('sparse, 255 is frequent', [0, 40, 90, 255], None, 'mask_values="{0:', 4),
    ('class numbers with gaps', [0, 5, 14, 55], None, 'num_classes=', 56),
    ('sparse, one of them meant', [0, 40, 90, 255], None, 'mask_values="{255:', 2),
    ('colours', [0, 0xff0000, 0x0000ff], 'RGB', 'mask_values="{', 3),
    ('two values', [7, 9], None, 'mask_values="{9:', 2),
    ('cracks are 255, other regions 3 and 4', [0] * 40 + [3, 4, 255, 255, 255], None,
     'mask_values="{255:', 2),
    ('ends with a few greys', [0, 2, 4, 251, 253, 255], None, 'mask_values=">', 2),
]


@pytest.mark.parametrize('stored, kind, start, num_classes', [row[1:] for row in UNCLEAR],
                         ids=[row[0] for row in UNCLEAR])
def test_unclear_values_are_asked_for(tmp_path, stored, kind, start, num_classes):
    """The error offers a line, and typing that line works."""
    folder, _ = coded_set(tmp_path / 'set', stored, kind=kind)
    line = offered(ask(folder), start)
    _, data = inspect(folder, **typed(line))
    assert data.coding.num_classes == num_classes
    assert 0 < data.shares[0] < 1


def test_shown_values_include_the_ignored(tmp_path):
    """Where 255 is most of the picture, the user must see so before it is ignored."""
    folder, _ = coded_set(tmp_path / 'set', [0, 40, 90, 255, 255, 255])
    assert re.search(r'255 \(50', str(ask(folder)))


@pytest.mark.parametrize('first', [lambda n: 1, lambda n: 1 + 200 * n], ids=['from 1', 'unique'])
def test_instance_ids_are_no_classes(tmp_path, first):
    """16-bit ids of objects, counted from 1 in each image or through the whole set."""
    for n in range(3):
        ids = np.pad(np.arange(100).reshape(10, 10) + first(n), 3)
        save(tmp_path / f'set/images/{n}.png', np.zeros((16, 16, 3)))
        save(tmp_path / f'set/masks/{n}.png', ids, 'I;16')
    line = offered(ask(tmp_path / 'set'), 'mask_values=nonzero')
    _, data = inspect(tmp_path / 'set', **typed(line))
    assert data.coding.num_classes == 2
    assert data.shares[1] == pytest.approx(100 / 256)


def test_a_few_instance_ids_are_no_classes(tmp_path):
    """Penn-Fudan: 0, 1, ... n in a picture of n people. Classes would not count through."""
    for number, people in enumerate([1, 2, 4, 3, 8, 2]):
        mask = np.zeros((16, 16))
        mask[0, :people] = 1 + np.arange(people)
        save(tmp_path / f'set/PNGImages/Ped{number}.png', np.zeros((16, 16, 3)))
        save(tmp_path / f'set/PedMasks/Ped{number}_mask.png', mask)
    line = offered(ask(tmp_path / 'set'), 'mask_values=nonzero')
    _, data = inspect(tmp_path / 'set', **typed(line))
    assert data.coding.num_classes == 2


@pytest.mark.parametrize('values', [(0, 255), (0, 1)])
def test_inverted_masks_are_suspected(tmp_path, values):
    """Nearly all foreground: a note with a line that turns it round."""
    for n in range(3):
        mask = np.full((16, 16), values[1])
        mask[0] = values[0]
        save(tmp_path / f'set/images/{n}.png', np.zeros((16, 16, 3)))
        save(tmp_path / f'set/masks/{n}.png', mask)
    _, data = inspect(tmp_path / 'set')
    line = offered('\n'.join(data.notes), 'mask_values=')
    _, turned = inspect(tmp_path / 'set', **typed(line))
    assert turned.shares.tolist() == pytest.approx(data.shares[::-1].tolist())


def test_wanted_number_of_classes_is_kept(tmp_path):
    """Classes that no mask holds still count."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    assert inspect(folder, num_classes=7)[1].coding.num_classes == 7


def test_wanted_number_of_classes_explains_gaps(tmp_path):
    """59 classes of which few occur: the user said how many there are."""
    folder, _ = coded_set(tmp_path / 'set', [0, 5, 14, 55])
    _, data = inspect(folder, num_classes=59)
    assert data.coding.encode(np.array([[0, 5, 14, 55]])).tolist() == [[0, 5, 14, 55]]


# --- reading images ------------------------------------------------------------------


def bands(count, dtype=np.float32):
    """(4, 6, count) with the value of each band its number."""
    return np.zeros((4, 6, count), dtype) + np.arange(count, dtype=dtype)


def picture(mode, colour):
    """A Pillow image of one colour."""
    return lambda path: PIL.Image.new(mode, (6, 4), colour).save(path)


def palette_picture(path):
    image = PIL.Image.new('P', (6, 4), 3)
    image.putpalette([0] * 9 + [10, 20, 30])
    image.save(path)


def planar(path):
    tifffile.imwrite(path, np.moveaxis(bands(5), -1, 0), planarconfig='separate',
                     photometric='minisblack')


def tiff(array, **how):
    """A writer of a TIFF file that Pillow could not have written."""
    return lambda path: tifffile.imwrite(path, array, **{'photometric': 'minisblack', **how})


def array_file(array, kind=None):
    """A writer of a .npy file, or with Pillow."""
    return lambda path: save(path, array, kind)


FULL = 65535
GREY = np.full((4, 6), 300)
# name, file, how it is written, in_channels, its pixel, the type of the result
IMAGES = [
    ('grey', 'x.png', picture('L', 200), 3, [200] * 3, 'uint8'),
    ('grey for one channel', 'x.png', picture('L', 200), 1, [200], 'uint8'),
    ('colour for one channel', 'x.png', picture('RGB', (90, 90, 90)), 1, [90], 'uint8'),
    ('RGB', 'x.bmp', picture('RGB', (10, 20, 30)), 3, [10, 20, 30], 'uint8'),
    ('RGBA', 'x.png', picture('RGBA', (10, 20, 30, 0)), 3, [10, 20, 30], 'uint8'),
    ('RGBA for four', 'x.png', picture('RGBA', (10, 20, 30, 0)), 4, [10, 20, 30, 0], 'uint8'),
    ('RGBA TIFF', 'x.tif', picture('RGBA', (10, 20, 30, 0)), 3, [10, 20, 30], 'uint8'),
    ('grey with alpha', 'x.png', picture('LA', (10, 9)), 3, [10] * 3, 'uint8'),
    ('palette', 'x.png', palette_picture, 3, [10, 20, 30], 'uint8'),
    ('palette GIF', 'x.gif', palette_picture, 3, [10, 20, 30], 'uint8'),
    ('CMYK', 'x.tif', picture('CMYK', (0, 255, 255, 0)), 3, [255, 0, 0], 'uint8'),
    ('CMYK JPEG', 'x.jpg', picture('CMYK', (0, 0, 0, 0)), 3, [255] * 3, 'uint8'),
    ('1 bit', 'x.png', picture('1', 1), 3, [255] * 3, 'uint8'),
    ('16-bit PNG', 'x.png', array_file(100 * GREY, 'I;16'), 3, [30000 / FULL] * 3, 'float32'),
    ('16-bit TIFF', 'x.tif', array_file(GREY, 'I;16'), 1, [300 / FULL], 'float32'),
    ('16-bit RGB TIFF', 'x.tif', tiff(bands(3, np.uint16), photometric='rgb'), 3,
     [0, 1 / FULL, 2 / FULL], 'float32'),
    ('float TIFF', 'x.tif', tiff(np.float32(-GREY / 8)), 1, [-37.5], 'float32'),
    ('planar TIFF', 'x.tif', planar, 5, [0, 1, 2, 3, 4], 'float32'),
    ('interleaved TIFF', 'x.tif', tiff(bands(5, np.uint8), planarconfig='contig'), 5,
     [0, 1, 2, 3, 4], 'uint8'),
    ('signed TIFF', 'x.tif', tiff(-bands(2, np.int16), planarconfig='contig'), 2,
     [0, -1], 'float32'),
    ('.npy', 'x.npy', array_file(bands(7)), 7, [0, 1, 2, 3, 4, 5, 6], 'float32'),
    ('.npy, bands first', 'x.npy', array_file(np.moveaxis(bands(7), -1, 0)), 7,
     [0, 1, 2, 3, 4, 5, 6], 'float32'),
    ('grey .npy', 'x.npy', array_file(GREY.astype(np.uint8)), 3, [44] * 3, 'uint8'),
    ('16-bit .npy', 'x.npy', array_file(GREY.astype(np.uint16)), 1, [300 / FULL], 'float32'),
    ('.mat', 'x.mat', array_file(GREY / 8), 1, [37.5], 'float32'),
]


@pytest.mark.parametrize('name, write, channels, pixel, dtype', [row[1:] for row in IMAGES],
                         ids=[row[0] for row in IMAGES])
def test_image(tmp_path, name, write, channels, pixel, dtype):
    write(tmp_path / name)
    config, _, _ = train_unet.resolve_config(None, {'in_channels': channels})
    array = train_unet.read_image(str(tmp_path / name), config)
    assert array.shape == (4, 6, channels)
    assert array.dtype == dtype
    assert array[1, 2] == pytest.approx(pixel)


def test_exif_rotation_of_an_image_is_followed(tmp_path):
    """The mask was drawn on the picture as it is shown: upright, with the bright half on top."""
    folder = tmp_path / 'set'
    shown = np.zeros((32, 16, 3), np.uint8)
    shown[:16] = 250
    for n in range(2):
        save(folder / f'masks/{n}.png', shown[..., 0] > 0)
        exif = PIL.Image.Exif()
        exif[274] = 6                                                  # turn clockwise to show
        (folder / 'images').mkdir(exist_ok=True)
        PIL.Image.fromarray(np.rot90(shown).copy()).save(folder / f'images/{n}.jpg', exif=exif)
    data, _ = dataset(folder)
    image, mask = data.read(0)
    assert ((image[..., 0] > 128) == (mask > 0)).all()


def test_depths_may_be_mixed(tmp_path):
    """8 and 16 bits of the same scene come out the same."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=4)
    for n in range(4):
        value, kind = (100 * 257, 'I;16') if n % 2 else (100, None)
        save(folder / f'images/{n}.png', np.full((4, 16), value), kind)
    data, config = dataset(folder, val_fraction=0.25)
    assert config['image_dtype'] == 'float32'
    assert [data.read(i)[0].mean() for i in range(len(data))] == pytest.approx([100 / 255] * len(data))


# --- augmentation --------------------------------------------------------------------


def samples(data, config, workers, epoch=0):
    """All samples of one epoch through a loader, as {index: (image, mask)}."""
    sampler = WindowSampler(len(data), config)
    sampler.epoch = epoch
    config = {**config, 'num_workers': workers}
    loader = train_unet.build_loader(data, config, CPU, batch_sampler=sampler)
    return {int(i): (image, mask) for batch in loader
            for i, image, mask in zip(batch['index'], batch['image'], batch['mask'])}


LONG = {'num_epochs': 100}         # a run in which the default changes every other image


def differing(first, second):
    """How many images are not the same."""
    return sum(not torch.equal(first[i][0], second[i][0]) for i in first)


@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_augmentation_is_the_same_for_any_number_of_workers(small_set, augment):
    data, config = dataset(small_set, augment=augment, **LONG)
    alone, helped = samples(data, config, 0), samples(data, config, 2)
    assert differing(alone, helped) == 0
    assert all(torch.equal(alone[i][1], helped[i][1]) for i in alone)


def test_augmentation_differs_between_epochs(small_set):
    data, config = dataset(small_set, **LONG)
    assert differing(samples(data, config, 0, 0), samples(data, config, 0, 1)) >= len(data) - 2


def test_augmentation_differs_between_seeds(small_set):
    data, config = dataset(small_set, **LONG)
    first = samples(data, config, 0)
    data.config = config = {**config, 'seed': 1}
    assert differing(first, samples(data, config, 0)) >= len(data) - 2


def test_augmentation_differs_between_images(tmp_path):
    """Equal images are not all augmented alike."""
    folder, place = coded_set(tmp_path / 'set', [0, 1], count=12)
    for path in (folder / 'images').iterdir():
        save(path, np.random.default_rng(0).integers(0, 255, (*place.shape, 3)))
    data, config = dataset(folder, **LONG)
    assert len({image.numpy().tobytes() for image, _ in samples(data, config, 0).values()}) >= 7


def test_transforms_are_drawn_independently(small_set):
    """Three coins leave one image in eight as it is; with one coin for all it would be half."""
    data, config = dataset(small_set, **LONG)
    same = []
    for index in range(len(data)):
        plain = torch.from_numpy(data.read_resized(index)[0]).permute(2, 0, 1)
        mirrored = plain.flip(2)
        for epoch in range(20):
            image = data[(epoch, index)]['image']
            same.append([torch.equal(image, plain), torch.equal(image, mirrored)])
    assert np.mean(same, axis=0) == pytest.approx([1 / 8, 1 / 8], abs=0.07)


@pytest.mark.parametrize('policy', ['resize', 'crop', 'pad'])
@pytest.mark.parametrize('augment', ['default', 'strong'])
def test_masks_hold_only_original_ids(tmp_path, augment, policy):
    """No class is made up between two others; what comes in from outside is ignored."""
    folder, _ = coded_set(tmp_path / 'set', [0, 5, 9], kind='P', count=8)
    data, config = dataset(folder, augment=augment, size_policy=policy, **LONG)
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
    data, config = dataset(folder, augment=augment, image_dtype='float32', **LONG)   # no change of colour
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
    data, config = dataset(folder, augment=augment, in_channels=channels, **LONG)
    for epoch in range(3):
        for image, _ in samples(data, config, 0, epoch).values():
            assert image.shape == (channels, 32, 32)
            assert image.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)


def test_validation_is_not_augmented(small_set):
    data, config = dataset(small_set, 'val', augment='strong')
    image, mask = data.read(0)
    assert torch.equal(data[(0, 0)]['image'], data[(1, 0)]['image'])
    assert torch.equal(data[(0, 0)]['full_mask'], torch.from_numpy(mask))
    assert (data[0]['image'].permute(1, 2, 0).numpy() == train_unet.resize(image, 32, 32)).all()


@pytest.mark.parametrize('workers', [0, 2])
def test_cached_images_are_those_on_disk(small_set, workers):
    """The cache in shared memory changes nothing, when it is filled and when it is read."""
    cached, config = dataset(small_set, cache_images=True)
    plain, _ = dataset(small_set, cache_images=False)
    for epoch in (0, 1):
        found = samples(cached, config, workers, epoch)
        assert differing(found, samples(plain, config, 0, epoch)) == 0
    assert cached.cache[2].all() and plain.cache is None


# --- windows -------------------------------------------------------------------------

SIZES = [(count, batch, passes) for count in (2, 3, 7, 8, 9, 17, 33, 64) for batch in (1, 2, 4, 8)
         for passes in (1, 3)]
SHARED_OUT = [sizes for sizes in SIZES if sizes[0] >= 7 and sizes[1] * sizes[2] >= 6]


def sampler_of(count, batch, passes, **ranks):
    config = {**train_unet.CONFIG, 'batch_size': batch, 'accumulation_steps': passes}
    return WindowSampler(count, config, **ranks)


@pytest.mark.parametrize('count, batch, passes', SIZES)
def test_each_image_once_per_epoch(count, batch, passes):
    sampler = sampler_of(count, batch, passes)
    seen = [key for indices in sampler for key in indices]
    assert sorted(seen) == [(0, i) for i in range(count)]


@pytest.mark.parametrize('count, batch, passes', SIZES)
def test_micro_batches_have_the_wanted_size(count, batch, passes):
    """At most batch_size images, one more only to spare a leftover of one, which never is alone."""
    lengths = [len(indices) for indices in sampler_of(count, batch, passes)]
    assert max(lengths) <= batch + (1 if batch > 1 and count % 2 else 0)
    assert batch == 1 or min(lengths) >= 2


@pytest.mark.parametrize('count, windows', [(16, [8, 8]), (17, [8, 9]), (19, [8, 11]),
                                            (20, [8, 8, 4]), (7, [7]), (1, [1])])
def test_small_leftover_joins_the_window_before(count, windows):
    assert [len(window) for window in sampler_of(count, 8, 1).windows()] == windows


@pytest.mark.parametrize('world', [2, 3])
@pytest.mark.parametrize('count, batch, passes', SHARED_OUT)
def test_ranks_share_each_window(count, batch, passes, world):
    """No image twice, none left out, and no rank without one: the others would wait for it."""
    ranks = [sampler_of(count, batch, passes, rank=rank, world_size=world) for rank in range(world)]
    for number, window in enumerate(ranks[0].windows()):
        shares = [np.concatenate(rank.micro_batches(rank.windows()[number])) for rank in ranks]
        assert sorted(np.concatenate(shares)) == sorted(window)


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


# --- the demo set --------------------------------------------------------------------


def test_no_threshold_solves_the_demo():
    """The best threshold on a colour, chosen with the truth at hand, stays below an IoU of 0.6."""
    counts = np.zeros((2, 3, 256))
    for number in range(240, 300):                                     # the validation images
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


# --- the scan cache ------------------------------------------------------------------


def scanned(monkeypatch, folder):
    """Stems of the masks that are read when the folder is looked at."""
    seen, real = [], train_unet.scan_pair
    spy = lambda image, mask, config: seen.append(Path(mask).stem) or real(image, mask, config)
    monkeypatch.setattr(train_unet, 'scan_pair', spy)
    inspect(folder)
    monkeypatch.setattr(train_unet, 'scan_pair', real)
    return sorted(seen)


def test_second_look_reads_no_file(monkeypatch, small_set):
    assert len(scanned(monkeypatch, small_set)) == 12
    assert scanned(monkeypatch, small_set) == []


@pytest.mark.parametrize('kind', ['images', 'masks'])
def test_changed_file_is_looked_at_again(monkeypatch, small_set, kind):
    """By its time; the size stays."""
    inspect(small_set)
    path = small_set / kind / '003.png'
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    assert scanned(monkeypatch, small_set) == ['003']


def test_file_of_another_size_is_looked_at_again(monkeypatch, small_set):
    """By its size; the time stays."""
    inspect(small_set)
    path = small_set / 'masks' / '003.png'
    time = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + b'\0')
    os.utime(path, ns=(time, time))
    assert scanned(monkeypatch, small_set) == ['003']


def test_changed_object_mask_is_seen(tmp_path):
    """Overwriting a file in a folder of object masks leaves the time of the folder as it was."""
    for n in range(2):
        fill(tmp_path / 'set', [f'id{n}/images/id{n}.png'], [f'id{n}/masks/{k}.png' for k in 'ab'])
    _, before = inspect(tmp_path / 'set')
    save(tmp_path / 'set/id0/masks/a.png', np.ones((8, 8)))
    _, after = inspect(tmp_path / 'set')
    assert after.values[1][0] > before.values[1][0]


@pytest.mark.parametrize('junk', ['', '{', '[]', '{"a": 1}'])
def test_broken_cache_is_replaced(monkeypatch, small_set, junk):
    config, _ = inspect(small_set)
    train_unet.cache_file(config).write_text(junk)
    assert len(scanned(monkeypatch, small_set)) == 12


# --- real data -----------------------------------------------------------------------

SETS = ('camvid', 'crackforest', 'isbi_em', 'nuclei_16bit', 'nuclei_dsb2018', 'sirst_infrared')


def shared(*parts):
    """A folder of the shared data; skips where there is none."""
    folder = SHARED.joinpath(*parts)
    if not folder.exists():
        pytest.skip(f'the shared data set {"/".join(parts)} is not on this machine')
    return folder


@pytest.mark.parametrize('name', SETS)
def test_real_set(name):
    """Classes, counts and shares are those that were measured when the set was made."""
    folder = shared(name)
    meta = json.loads((folder / 'meta.json').read_text())
    _, data = inspect(folder)
    total = sum(pixels for pixels, _ in data.values.values())
    assert data.coding.num_classes == meta['num_classes']
    splits = {split: len(data.pairs.rows(split)) for split in train_unet.SPLITS}
    assert {split: count for split, count in splits.items() if count} == meta['splits']
    assert len(data.sizes) == meta['image_sizes']
    assert {str(v): images for v, (_, images) in data.values.items()} == meta['images_with_value']
    shares = {str(v): 100 * pixels / total for v, (pixels, _) in data.values.items()}
    assert shares == pytest.approx(meta['pixel_share_percent'], abs=6e-4)


@pytest.mark.parametrize('name', ['nuclei_16bit', 'sirst_infrared'])
def test_real_images_are_read(name):
    """16 bits are scaled, not clipped; L, RGB, RGBA and P in one folder all become RGB."""
    data, config = dataset(shared(name))
    images = [data.read(i)[0] for i in range(0, len(data), len(data) // 25)]
    assert {image.shape[2] for image in images} == {3}
    if name == 'nuclei_16bit':
        assert config['image_dtype'] == 'float32'
        assert max(image.max() for image in images) < 0.7
        assert np.median([(image == image.max()).mean() for image in images]) < 0.01
    else:
        assert {image.dtype for image in images} == {np.dtype(np.uint8)}


# Folder, what is doubled where there is one image only (it cannot be split), the lines that errors
# must offer, one error after the other, number of classes, and the share of some value in %.
COLOURED = 'mask_values="{\'#000000\''
CONVENTIONS = [
    ('01_instance_mask_dirs_dsb2018', None, [], 2, {1: 3.44}),
    ('02_label_suffix_uppercase_ext_crackforest', None, [['mask_values="{255: 1}"']], 2,
     {255: 1.39}),
    ('03_rgb_coded_three_suffixes_cwfid', ('001_', '002_'),
     [['images="images"', 'masks="annotations"'], [COLOURED]], 3,
     {train_unet.COLOUR + 0x00ff00: 2.44}),
    ('03_rgb_coded_three_suffixes_cwfid', ('001_', '002_'),
     [['images="images"', 'masks="masks"']], 2, {255: 82.34}),
    ('04_pixels0_suffix_mixed_modes_sirst', None, [['skip_broken=True']], 2, {255: 0.04}),
    ('09_voc_palette_labelme', None, [], 19, {15: 12.44}),
    ('10_mat_labels_clothing_ccp', None, [['mask_values="{0:']], 13, {55: 4.5}),
    ('11_16bit_instance_ids_spaces_nucseg', None,
     [['images="40x air/images_16bit"', 'masks="40x air/label masks"'], ['mask_values=nonzero']], 2,
     {0: 84.48}),
    ('11_16bit_instance_ids_spaces_nucseg', None,
     [['images="40x air/images_8bit"', 'masks="40x air/mask binary"']], 2, {0: 84.48}),
    ('12_rgba_colour_coded_labelmefacade', None, [[COLOURED]], 8,
     {train_unet.COLOUR: 9.34}),
    ('13_sparse_grey_codes_other_stems_vnc', ('00.', '01.'), [['mask_values="{0:']], 9,
     {255: 73.29}),
    ('14_geotiff_bands_negative_ignore_sen1floods11', ('579_', '580_'),
     [['images="S1"', 'masks="Labels"'], ['in_channels=2']], 2, {-1: 0.04}),
    ('14_geotiff_bands_negative_ignore_sen1floods11', ('579_', '580_'),
     [['images="S2"', 'masks="Labels"'], ['in_channels=13']], 2, {1: 26.72}),
]


def doubled(folder, copy, old, new):
    """A copy of a convention with a second image; `old` in a file name becomes `new`."""
    for path in sorted(p for p in folder.rglob('*') if p.is_file()):
        target = copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if old in path.name:
            shutil.copyfile(path, target.with_name(path.name.replace(old, new)))
    return copy


@pytest.mark.parametrize('name, twice, dialogue, num_classes, shares', CONVENTIONS,
                         ids=[f'{row[0]}-{n}' for n, row in enumerate(CONVENTIONS)])
def test_real_convention(tmp_path, name, twice, dialogue, num_classes, shares):
    """It works as it is, or each error offers the line that leads on."""
    folder = shared('conventions', name)
    folder = doubled(folder, tmp_path / name, *twice) if twice else folder
    overrides = {}
    for lines in dialogue:
        with pytest.raises(DataError) as caught:
            dataset(folder, **overrides)[0].read(0)
        for line in lines:
            overrides |= typed(offered(caught.value, line))
    data, _ = dataset(folder, **overrides)
    image, mask = data.read(0)
    assert image.shape[:2] == mask.shape
    _, data = inspect(folder, **overrides)
    assert data.coding.num_classes == num_classes
    total = sum(pixels for pixels, _ in data.values.values())
    assert {v: 100 * data.values[v][0] / total for v in shares} == pytest.approx(shares, abs=0.01)


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


@pytest.mark.parametrize('kind, count, epochs', [
    ('cpu', 400, 20), ('cpu', 9000, 10), ('cuda', 400, 80), ('cuda', 10, 200), ('cuda', 9000, 20)])
def test_usual_epochs_and_workers(small_set, monkeypatch, kind, count, epochs):
    """About 1,000 steps on a CPU and 4,000 on a GPU, at least 10 and 20 epochs, at most 200; a core is left free."""
    monkeypatch.setattr(train_unet, 'num_cores', lambda: 4)
    config, data = inspect(small_set)
    data.pairs.images = np.repeat(data.pairs.images, -(-count // 9))[:count]
    data.pairs.masks, data.pairs.splits = data.pairs.images, np.zeros(count, np.int8)
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


@pytest.mark.parametrize('augment, epochs, chances', [
    ('default', 12, [0.5, 0.0, 0.0]), ('default', 25, [0.5, 0.0, 0.0]), ('default', 32, [0.5, 0.1, 0.1]),
    ('default', 60, [0.5, 0.5, 0.5]), ('default', 200, [0.5, 0.5, 0.5])])
def test_augmentation_grows_with_the_run(augment, epochs, chances):
    """Mirror images always, other changes the more often the more often an image is seen."""
    config = {**train_unet.CONFIG, 'augment': augment, 'num_epochs': epochs, 'image_size': [32, 32],
              'image_dtype': 'uint8'}
    steps = train_unet.build_augmentation(config).transforms
    assert [step.p for step in steps] == chances
