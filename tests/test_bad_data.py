"""Broken data: each kind ends in one error that names the file, never in another exception.

Run: python -m pytest tests/test_bad_data.py
"""
import io
import json
import os
import pickle
import struct
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import PIL.Image
import pytest
import scipy.io
import tifffile
import torch

import train_unet
from conftest import TINY, start_script
from helpers import WORDS

SHAPE = (12, 16)
DISC = np.hypot(*np.mgrid[-6:6, -8:8]) < 4


@pytest.fixture
def folder(tmp_path):
    """images/ and masks/ with a, b, c and d."""
    for name in 'abcd':
        image = np.full((*SHAPE, 3), 90) + 50 * DISC[..., None]
        put(tmp_path / 'set' / 'images' / f'{name}.png', image)
        put(tmp_path / 'set' / 'masks' / f'{name}.png', 255 * DISC)
    return tmp_path / 'set'


def put(path, content):
    """Write bytes, text or an array (in the format of the suffix; .npy keeps its type)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif path.suffix == '.npy':
        np.save(path, content)
    elif path.suffix == '.mat':
        scipy.io.savemat(path, {'groundtruth': content}, do_compression=True)
    elif path.suffix == '.tif' and (content.dtype.kind == 'f' or content.ndim > 2):
        tifffile.imwrite(path, content, photometric='minisblack', planarconfig='contig')
    else:
        PIL.Image.fromarray(content.astype(np.uint8)).save(path)


def look(path, **overrides):
    """What training does before its first step, and a look at every sample."""
    config, sources, _ = train_unet.resolve_config(None, {**TINY, 'data': str(path), **overrides})
    config, _, _, data, _ = train_unet.prepare(config, sources, torch.device('cpu'))
    for split in ('train', 'val'):
        dataset = train_unet.SegmentationDataset(data, split, config, split == 'train')
        for index in range(len(dataset)):
            dataset[index]
    return data


# --- ways to break a set: each returns a function of the folder ---


def replace(name, content):
    """A file gives way to another of this name."""
    def build(folder):
        (folder / name).with_suffix('.png').unlink()
        put(folder / name, content)
    return build


def add(**files):
    """More files; __ in a name is a slash, and the suffix follows the last _."""
    return lambda folder: [put(folder / '.'.join(name.replace('__', '/').rsplit('_', 1)), content)
                           for name, content in files.items()]


def keep(folder):
    """The data are sound; the settings are not."""


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def rename(**names):
    """Folders get other names."""
    return lambda folder: [(folder / old).rename(folder / new) for old, new in names.items()]


def truncate(name, share):
    """A file is written as `name` and loses its end."""
    def build(folder):
        mask = name.startswith('masks')
        array = np.random.default_rng(0).integers(0, 255, (*SHAPE, 3)) if not mask else DISC * 1
        path = folder / name
        path.with_suffix('.png').unlink()
        put(path, array[..., 0] if name.endswith('mat') and not mask else array)
        path.write_bytes(path.read_bytes()[:int(path.stat().st_size * share)])
    return build


def listed(text):
    """A list file instead of the folder."""
    def build(folder):
        put(folder / 'list.csv', text)
        return folder / 'list.csv'
    return build


def other_format(folder):
    for path in list(folder.glob('*/*')):
        path.rename(path.with_suffix('.heic'))


def other_stems(folder):
    for stem, path in zip(('one', 'two', 'six', 'ten'), sorted((folder / 'masks').iterdir())):
        path.rename(path.with_stem(stem))


def image_is_folder(folder):
    (folder / 'images/b.png').unlink()
    (folder / 'images/b.png').mkdir()


def circle(folder):
    (folder / 'images/up').symlink_to('..')
    (folder / 'masks/b.png').unlink()


def link(name, target):
    def build(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
    return build


def rotated_mask(folder):
    exif = PIL.Image.Exif()
    exif[274] = 6
    PIL.Image.open(folder / 'masks/b.png').save(folder / 'masks/b.png', exif=exif)


def pages(folder):
    (folder / 'images/b.png').unlink()
    array = np.zeros((5, *SHAPE), np.uint8)
    tifffile.imwrite(folder / 'images/b.tif', array, photometric='minisblack')


def zipped_arrays(folder):
    (folder / 'images/b.png').unlink()
    np.savez(folder / 'images/b.npz', a=np.zeros(SHAPE))
    (folder / 'images/b.npz').rename(folder / 'images/b.npy')


def flip(path, start):
    """Change bytes in the compressed part of a file."""
    data = bytearray(path.read_bytes())
    data[start:start + 20] = bytes(255 - byte for byte in data[start:start + 20])
    path.write_bytes(data)


def flipped_tiff(folder):
    (folder / 'images/b.png').unlink()
    array = np.random.default_rng(0).random((*SHAPE, 3), np.float32)
    tifffile.imwrite(folder / 'images/b.tif', array, photometric='minisblack', compression='zlib',
                     planarconfig='contig')
    flip(folder / 'images/b.tif', -200)


def flipped_mat(folder):
    replace('masks/b.mat', NOISE)(folder)
    flip(folder / 'masks/b.mat', -60)


def two_matrices(folder):
    (folder / 'masks/b.png').unlink()
    scipy.io.savemat(folder / 'masks/b.mat', {'one': np.zeros(SHAPE), 'two': np.zeros(SHAPE)})


def bomb(width, height):
    """A PNG of a few bytes that claims to be huge."""
    chunks = ((b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)),
              (b'IDAT', zlib.compress(bytes(99))), (b'IEND', b''))
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        for kind, data in chunks)


def huge_array():
    """The header of a .npy of 10 GB, and no data."""
    text = "{'descr': '|u1', 'fortran_order': False, 'shape': (100000, 100000), }"
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text) + 1) + text.encode() + b'\n'


def holding(value, dtype=np.float32):
    array = np.zeros(SHAPE, dtype)
    array[3, 4] = value
    return array


HEADER = 'image,mask,split\n'
GOOD = 'images/a.png,masks/a.png,train\nimages/c.png,masks/c.png,val\n'
MATLAB_7_3 = b'MATLAB 7.3 MAT-file'.ljust(124) + b'\0\2IM' + bytes(99)
COLOURS = np.array([1, 2, 3])
NOISE = np.random.default_rng(0).integers(0, 256, SHAPE)

# name, how the set is broken, settings, what the error must say
BAD = [
    # folders and names
    ('missing folder', lambda f: f.parent / 'sett', {},
     "sett: there is no such folder: did you mean 'set'?"),
    ('the beginning of a folder', lambda f: f.rename(f.parent / 'nuclei_dsb2018') and f.parent / 'nuclei', {},
     "nuclei: there is no such folder: did you mean 'nuclei_dsb2018'?"),
    ('a name in other letters, mistyped', lambda f: f.rename(f.parent / 'снимки') and f.parent / 'снимк', {},
     "снимк: there is no such folder: did you mean 'снимки'?"),
    ('a path of Windows in Python', lambda f: f.parent / 'D:\train', {},
     r'D:\train: there is no such folder; a backslash was read as the beginning of a tab'),
    ('a file', lambda f: f / 'images/a.png', {}, 'a.png: is a file'),
    ('missing list', lambda f: f / 'list.csv', {}, 'list.csv: there is no such'),
    ('a list of another ending', lambda f: put(f / 'list.txt', 'a b') or f / 'list.txt', {},
     'in .csv, with the columns image,mask'),
    ('empty folder', lambda f: (f / 'new').mkdir() or f / 'new', {}, 'found 0 images and 0 masks'),
    ('images only', lambda f: f / 'images', {}, 'found 4 images and 0 masks'),
    ('no masks', remove(*(f'masks/{n}.png' for n in 'abcd')), {}, 'found 4 images and 0 masks'),
    ('no images', remove(*(f'images/{n}.png' for n in 'abcd')), {}, 'found 0 images and 4 masks'),
    ('formats that nobody reads', other_format, {}, '8 files, *.heic'),
    ('folders without meaning', rename(images='one', masks='two'), {}, 'it holds one, two'),
    ('two folders of masks', add(labels__a_png=DISC), {}, 'several folders could hold the masks: labels, masks'),
    ('images= alone', keep, {'images': 'images'}, 'images="images" masks="masks"'),
    ('images= is not there', keep, {'images': 'image', 'masks': 'masks'},
     "did you mean 'images'"),
    ('wrong stems', other_stems, {}, 'image without a mask'),
    ('image without a mask', remove('masks/b.png'), {}, 'images/b.png'),
    ('mask without an image', remove('images/b.png'), {}, 'masks/b.png'),
    ('no name like the pattern', keep, {'mask_pattern': '{stem}_mask.png'},
     'not like {stem}_mask.png'),
    ('two images of one stem', add(images__b_jpg=NOISE), {}, 'images/b.jpg'),
    ('two images of one stem, others skipped', add(images__b_jpg=NOISE), {'skip_unpaired': True},
     'images/b.jpg'),
    ('two masks of one stem', add(masks__b_bmp=DISC), {}, 'masks/b.bmp'),
    ('one pair', remove(*(f'{kind}/{n}.png' for kind in ('images', 'masks') for n in 'bcd')), {},
     'cannot be split'),
    ('one group', keep, {'group_pattern': '^()'}, "in 1 group (group_pattern='^()') cannot be split"),
    ('folder named as an image', image_is_folder, {}, 'mask without an image'),
    ('link to nowhere', link('images/b.png', 'gone.png'), {}, 'images/b.png'),
    ('link to itself', link('images/b.png', 'b.png'), {}, 'images/b.png'),
    ('links in a circle', circle, {}, 'images/b.png'),
    # files that cannot be decoded
    ('empty image', replace('images/b.png', b''), {}, 'images/b.png'),
    ('empty mask', replace('masks/b.png', b''), {}, 'masks/b.png'),
    ('text as image', replace('images/b.png', 'hello'), {}, 'images/b.png: cannot be read: is no picture of a known'),
    ('text as mask', replace('masks/b.png', 'hello'), {}, 'masks/b.png'),
    ('text as TIFF', replace('images/b.tif', 'hello'), {}, 'images/b.tif'),
    ('text as .npy', replace('images/b.npy', 'hello'), {}, 'images/b.npy: cannot be read: is no array'),
    ('text as .mat', replace('masks/b.mat', 'hello' * 99), {}, 'masks/b.mat'),
    ('zeros as .mat', replace('masks/b.mat', bytes(999)), {}, 'masks/b.mat'),
    ('.mat of version 7.3', replace('masks/b.mat', MATLAB_7_3), {}, 'masks/b.mat: cannot be read: is of MATLAB 7.3'),
    ('flipped bits in a TIFF', flipped_tiff, {}, 'images/b.tif'),
    ('flipped bits in a .mat', flipped_mat, {}, 'masks/b.mat'),
    ('unfinished .npy', replace('images/b.npy', b"\x93NUMPY\1\0\x0b\0{'descr': (\n"), {},
     'images/b.npy'),
    ('pickle as .npy', replace('images/b.npy', np.array([{}], object)), {}, 'images/b.npy'),
    ('.npz as .npy', zipped_arrays, {}, 'images/b.npy'),
    *((f'truncated {name} at {share}', truncate(name, share), {}, name) for share in (0.1, 0.7)
      for name in ('images/b.png', 'images/b.jpg', 'images/b.tif', 'images/b.gif', 'images/b.bmp',
                   'images/b.webp', 'images/b.npy', 'images/b.mat', 'masks/b.png', 'masks/b.tif',
                   'masks/b.npy', 'masks/b.mat')),
    # sizes and channels
    ('mask of another size', replace('masks/b.png', np.zeros((9, 7))), {},
     'b.png: is 16 x 12 pixels, its mask'),
    ('mask lying on its side', replace('masks/b.png', DISC.T), {}, 'b.png 12 x 16'),
    ('mask with a rotation', rotated_mask, {}, 'masks/b.png: carries a rotation (EXIF orientation 6) that its image'),
    ('too few channels', keep, {'in_channels': 5}, 'type in_channels=3'),
    ('too few channels for alpha', keep, {'in_channels': 4}, 'type in_channels=3'),
    ('too many bands', replace('images/b.npy', np.zeros((*SHAPE, 7))), {},
     'images/b.npy: has 7 channels'),
    ('too many bands in a TIFF', replace('images/b.tif', np.zeros((*SHAPE, 7), np.uint8)), {},
     'images/b.tif: has 7 channels'),
    ('a stack of pages', pages, {}, 'images/b.tif'),
    ('mask of two channels', replace('masks/b.npy', np.zeros((*SHAPE, 2))), {},
     'masks/b.npy: a mask of the shape'),
    ('one axis', replace('images/b.npy', np.zeros(5)), {},
     'images/b.npy: cannot be read: has the shape (5,)'),
    ('no axis', replace('masks/b.npy', np.array(5)), {},
     'masks/b.npy: cannot be read: has the shape ()'),
    ('four axes', replace('images/b.npy', np.zeros((1, 2, *SHAPE))), {},
     'images/b.npy: cannot be read: has the shape (1, 2, 12, 16)'),
    ('no pixels', replace('images/b.npy', np.zeros((0, 5))), {}, 'images/b.npy: cannot be read'),
    ('bomb', replace('images/b.png', bomb(60_000, 60_000)), {}, 'type max_image_pixels='),
    ('bomb as a mask', replace('masks/b.png', bomb(15_000, 20_000)), {},
     'masks/b.png: 15000 x 20000 pixels is above max_image_pixels'),
    ('bomb above the limit of Pillow', replace('images/b.png', bomb(2**31 - 1, 2**31 - 1)), {},
     'images/b.png'),
    ('bomb below our limit', replace('images/b.png', bomb(9_000, 9_000)), {}, 'images/b.png'),
    ('huge .npy', replace('images/b.npy', huge_array()), {}, 'images/b.npy'),
    ('limit of the user', keep, {'max_image_pixels': 100}, 'type max_image_pixels=192'),
    # values
    ('NaN in a TIFF', replace('images/b.tif', holding(np.nan)), {},
     'images/b.tif: holds pixels that are not finite'),
    ('NaN in a .npy', replace('images/b.npy', holding(np.nan)), {},
     'images/b.npy: holds pixels that are not finite'),
    ('infinity', replace('images/b.npy', holding(-np.inf)), {},
     'images/b.npy: holds pixels that are not finite'),
    ('letters in an image', replace('images/b.npy', np.full(SHAPE, 'x')), {}, 'images/b.npy'),
    ('letters in a mask', replace('masks/b.npy', np.full(SHAPE, 'x')), {}, 'masks/b.npy'),
    ('complex image', replace('images/b.npy', holding(1j, complex)), {}, 'images/b.npy'),
    ('fractions in a mask', replace('masks/b.npy', holding(0.5)), {},
     'masks/b.npy: holds fractions, NaN or infinity; a mask holds whole numbers or colours; of probabilities save'),
    ('a plane for each class', replace('masks/b.npy', np.stack([DISC, 1 - DISC] * 2)), {}, 'save mask.argmax(0), of'),
    ('a plane for each object', replace('masks/b.npy', np.stack([DISC] * 3)), {}, 'save mask.any(0), of'),
    ('the planes last', replace('masks/b.npy', np.stack([DISC, 1 - DISC] * 4, 2)), {}, 'save mask.argmax(2), of'),
    ('NaN in a mask', replace('masks/b.npy', holding(np.nan)), {}, 'masks/b.npy'),
    ('infinity in a mask', replace('masks/b.npy', holding(np.inf)), {}, 'masks/b.npy'),
    ('a number too large in a mask', replace('masks/b.npy', np.full(SHAPE, 2**32 + 1)), {},
     'masks/b.npy: holds the number 4294967297'),
    ('two matrices', two_matrices, {}, 'masks/b.mat: cannot be read: holds 2 matrices'),
    ('noise as a mask', replace('masks/b.png', NOISE), {}, 'type mask_values=nonzero'),
    ('a photograph as a mask', replace('masks/b.png', NOISE[..., None] * COLOURS), {},
     'or like photographs'),
    ('class too many', keep, {'num_classes': 2, 'mask_values': {0: 0, 255: 2}},
     'type num_classes=3'),
    ('unnamed value', keep, {'mask_values': {0: 0}, 'ignore_index': None},
     'mask_values does not name 255'),
    ('ignored and a class', keep, {'mask_values': {0: 0, 255: 1}, 'ignore_index': 0},
     'ignore_index=0: mask_values makes 0 class 0; leave one out'),
    ('names for other classes', keep, {'class_names': ['a', 'b', 'c']},
     "class_names=['a', 'b', 'c']: 3 names for 2 classes, 0 to 1"),
    ('value that no mask holds', keep, {'mask_values': {7: 1}},
     'mask_values names 7, none of which occurs'),
    ('colour that no mask holds', keep, {'mask_values': {'#ff0000': 1}},
     "mask_values names '#ff0000', none of which occurs"),
    # settings
    ('pattern without stem', keep, {'mask_pattern': '*_mask.png'}, '{stem}_label.png'),
    ('no regular expression', keep, {'group_pattern': '('}, 'not a regular expression'),
    ('no colour', keep, {'mask_values': {'#ff00': 1}}, "'#ff00': 1 must map"),
    ('no threshold', keep, {'mask_values': '>=7'}, '">127"'),
    ('class above 255', keep, {'mask_values': {255: 300}}, '255: 300 must map'),
    # list files
    ('empty list', listed(''), {}, 'needs a header line'),
    ('header only', listed(HEADER), {}, 'needs a header line'),
    ('no header', listed(GOOD), {}, 'needs a header line'),
    ('unknown split', listed(HEADER + GOOD + 'images/b.png,masks/b.png,yes\n'), {},
     "line 4: split='yes'"),
    ('no mask in a line', listed(HEADER + GOOD + 'images/b.png,,\n'), {}, 'list.csv, line 4'),
    ('short line', listed(HEADER + GOOD + 'images/b.png\n'), {}, 'list.csv, line 4'),
    ('missing file', listed(HEADER + GOOD + 'images/x.png,masks/a.png,\n'), {}, 'images/x.png'),
    ('above the folder', listed(HEADER + GOOD + '../../x.png,masks/a.png,\n'), {}, '../../x.png'),
    ('folder as image', listed(HEADER + GOOD + 'images,masks/a.png,train\n'), {},
     'set/images: cannot be read'),
    ('NUL', listed(HEADER + GOOD + 'images/\0.png,masks/a.png,\n'), {},
     'list.csv, line 4: there is no ' if sys.version_info >= (3, 11) else 'read as csv'),
    ('Latin-1', listed((HEADER + 'ä,' + GOOD).encode('latin-1')), {}, 'read as csv'),
    ('UTF-16', listed((HEADER + GOOD).encode('utf-16')), {}, 'save it as UTF-8'),
    ('a picture as list', listed(bomb(5, 5)), {}, 'read as csv'),
    ('no training images', listed((HEADER + GOOD).replace('train', 'val')), {}, 'no line has split=train'),
]


@pytest.mark.parametrize('build, settings, text', [row[1:] for row in BAD],
                         ids=[row[0] for row in BAD])
def test_bad_data(monkeypatch, folder, build, settings, text):
    """One UserError that says what is wrong and where."""
    monkeypatch.setattr(train_unet.time, 'sleep', lambda seconds: None)
    target = build(folder)
    with pytest.raises(train_unet.UserError) as caught:
        look(target if isinstance(target, Path) else folder, **settings)
    assert text in str(caught.value)


def test_unbroken_data(folder):
    """What the table breaks is sound before."""
    look(folder)
    look(listed(HEADER + GOOD)(folder))


def test_every_bad_file_is_named_and_only_those(folder):
    """One look finds them all."""
    for name in ('images/b.png', 'masks/c.png'):
        put(folder / name, 'hello')
    with pytest.raises(train_unet.DataError) as caught:
        look(folder)
    assert '2 of 4' in caught.value.title
    assert [name for name in 'abcd' if f'/{name}.png' in str(caught.value)] == ['b', 'c']


def test_many_bad_files_are_counted(tmp_path):
    """The first ten, and how many more there are."""
    for n in range(30):
        put(tmp_path / f'set/images/{n:02d}.png', 'hello')
        put(tmp_path / f'set/masks/{n:02d}.png', DISC)
    with pytest.raises(train_unet.DataError) as caught:
        look(tmp_path / 'set')
    assert '... and 20 more' in str(caught.value)
    assert len(str(caught.value).splitlines()) < 15


@pytest.mark.parametrize('suffix', ['.png', '.jpg', '.tif'])
def test_check_names_every_broken_image(folder, suffix):
    """Those that only break when their pixels are decoded, too."""
    for name in 'bc':
        truncate(f'images/{name}{suffix}', 0.7)(folder)
    with pytest.raises(train_unet.DataError) as caught:
        train_unet.check(**TINY, data=str(folder))
    assert all(f'images/{name}{suffix}' in str(caught.value) for name in 'bc')


class Bomb:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ('executed',)


@pytest.mark.parametrize('name', ['images/b.npy', 'masks/b.npy'])
@pytest.mark.parametrize('whole', [True, False], ids=['bare pickle', 'array of objects'])
def test_no_pickle_is_executed(folder, name, whole):
    content = io.BytesIO(pickle.dumps(Bomb()))
    if not whole:
        np.save(content, np.array([Bomb()], object), allow_pickle=True)
    replace(name, content.getvalue())(folder)
    with pytest.raises(train_unet.DataError, match=name):
        look(folder)
    assert not Path('executed').exists()


@pytest.mark.parametrize('name', ['images/b.png', 'masks/b.png'])
def test_skip_broken_leaves_out_what_cannot_be_read(folder, name):
    put(folder / name, 'hello')
    config, _, _ = train_unet.resolve_config(None, {'data': str(folder), 'skip_broken': True})
    data = train_unet.inspect_data(config)
    assert [Path(os.fsdecode(path)).stem for path in data.pairs.images] == ['a', 'c', 'd']
    assert any(name in note for note in data.notes)


def test_a_drive_that_fails_at_the_header_of_a_mask_leaves_no_record_of_it(folder, monkeypatch):
    """The mask was taken for no picture then: without its palette, its rotation and the noise of a JPEG, and from the
    cache in later runs too."""
    config, real = train_unet.resolve_config(None, {'data': str(folder)})[0], train_unet.mask_header
    def at_work(path):
        with monkeypatch.context() as patch:
            if path.endswith('b.png'):
                patch.setattr('PIL.Image.open', Mock(side_effect=OSError(5, 'Input/output error')))
            return real(path)
    with monkeypatch.context() as patch:
        patch.setattr('train_unet.mask_header', at_work)
        with pytest.raises(train_unet.DataError, match='masks/b.png: cannot be read: Input/output error'):
            train_unet.inspect_data(config)
    assert train_unet.inspect_data(config).modes == {'RGB image, L mask': 4}


@pytest.mark.parametrize('name', ['images/c.png', 'masks/c.png'])
def test_a_png_whose_end_is_zeros_is_broken(folder, name, capsys):
    """As a power cut or a torn download leaves it. Zeros are code of the compression: Pillow decoded them as black."""
    path = folder / name
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 2, SHAPE, np.uint8) * 255).save(path)
    content, config = path.read_bytes(), train_unet.resolve_config(None, {'data': str(folder)})[0]
    for kept in range(len(content) // 2, len(content) - 16):
        path.write_bytes(content[:kept] + bytes(len(content) - kept))
        with pytest.raises(train_unet.DataError, match=f'{name}: cannot be read'):
            train_unet.read_array(path, config, as_mask=name.startswith('masks'))
    assert train_unet.main(['check', f'data={folder}', *WORDS]) == 2
    assert f'{name}: cannot be read' in capsys.readouterr().err


def test_skip_broken_needs_images_on_both_sides(folder):
    """Without validation images it is said what the scores then are of; without training images nothing trains."""
    look(folder)
    for name in 'abcd':
        for kind in ('images', 'masks'):
            put(folder / kind / ('val' if name == 'a' else 'train') / f'{name}.png',
                (folder / kind / f'{name}.png').read_bytes())
            (folder / kind / f'{name}.png').unlink()
    put(folder / 'images/train/b.png', 'hello')
    look(folder, skip_broken=True)
    sound = (folder / 'images/val/a.png').read_bytes()
    put(folder / 'images/val/a.png', 'hello')
    config, *_ = train_unet.resolve_config(None, {**TINY, 'data': str(folder), 'skip_broken': True})
    assert any('no validation images: ' in note for note in train_unet.inspect_data(config).notes)
    put(folder / 'images/val/a.png', sound)
    for name in 'cd':
        put(folder / f'images/train/{name}.png', 'hello')
    with pytest.raises(train_unet.UserError, match='no training image is left'):
        look(folder, skip_broken=True)


# --- names ---

NAMES = [
    ('new line', 'one\n  two'),
    ('terminal escape', '\x1b[31mred\x1b[0m'),
    ('right to left', 'a\u202egnp'),
    ('other letters', 'größe_图_é'),
    ('bytes that are no text', os.fsdecode(b'caf\xe9')),
    ('quotes and brackets', '''it's "{stem}" [1]* %s'''),
    ('a dash in front', '--help'),
    ('equals sign', 'data=x'),
]


@pytest.mark.parametrize('name', [row[1] for row in NAMES], ids=[row[0] for row in NAMES])
def test_odd_name_is_told_safely(folder, name):
    """One line per problem, nothing that a terminal would obey or that cannot be written."""
    try:
        put(folder / 'images' / f'{name}.png', np.zeros(SHAPE))
    except (OSError, ValueError) as error:
        pytest.skip(f'this file system refuses the name: {error}')
    with pytest.raises(train_unet.DataError) as caught:
        look(folder)
    text = str(caught.value)
    assert len(text.splitlines()) == len(caught.value.problems) + 1
    assert all(c.isprintable() or c == '\n' for c in text)
    assert text.encode() and 'image without a mask' in text


@pytest.mark.parametrize('name', [row[1] for row in NAMES], ids=[row[0] for row in NAMES])
def test_odd_name_is_no_obstacle(folder, name):
    """It pairs, is read, and is kept in the cache."""
    try:
        put(folder / 'images' / f'{name}.png', np.zeros(SHAPE))
        put(folder / 'masks' / f'{name}.png', 255 * DISC)
    except (OSError, ValueError) as error:
        pytest.skip(f'this file system refuses the name: {error}')
    data = look(folder)
    kept = json.loads(train_unet.cache_file({**train_unet.CONFIG, 'data': str(folder)}).read_text())
    assert len(kept) == len(data.pairs.images) == 5
    look(folder)


def test_list_may_point_above_its_folder(folder):
    """.. is no crime where the file is there."""
    text = (HEADER + GOOD).replace('images/', '../images/').replace('masks/', '../masks/')
    put(folder / 'lists' / 'list.csv', text)
    assert len(look(folder / 'lists' / 'list.csv').pairs.images) == GOOD.count('\n')


# --- ignored pixels ---


@pytest.mark.parametrize('kind', train_unet.CHOICES['loss'])
@pytest.mark.parametrize('classes', [2, 3])
def test_ignored_image_has_the_loss_0(kind, classes):
    """No NaN, no gradient, and nothing in the confusion matrix."""
    config = {'loss': kind, 'num_classes': classes, 'size_policy': 'resize', 'image_size': [8, 8],
              'class_weights': None}
    loss_fn = train_unet.SegmentationLoss(config)
    logits = torch.randn(2, 1 if classes == 2 else classes, 8, 8, requires_grad=True)
    target = torch.zeros(2, 8, 8, dtype=torch.uint8)
    target[0] = 255
    losses, counts = loss_fn(lambda images: logits, {'image': None, 'mask': target})
    losses.sum().backward()
    assert losses[0] == 0 and losses[1] > 0
    assert (logits.grad[0] == 0).all() and logits.grad.isfinite().all()
    assert counts.sum() == 64


# --- the real command ---

COMMANDS = [
    ('missing folder', lambda f: f.parent / 'sett', 'did you mean'),
    ('wrong stems', remove('masks/b.png'), 'image without a mask'),
    ('text as image', replace('images/b.png', 'hello'), 'images/b.png'),
    ('truncated image', truncate('images/b.jpg', 0.5), 'images/b.jpg'),
    ('odd name', lambda f: put(f / 'images' / '\x1b[2J.png', np.zeros(SHAPE)), '\\x1b[2J.png'),
]


@pytest.mark.parametrize('build, text', [row[1:] for row in COMMANDS],
                         ids=[row[0] for row in COMMANDS])
def test_command_ends_with_2_and_no_traceback(folder, build, text, capsys):
    target = build(folder)
    target = target if isinstance(target, Path) else folder
    assert train_unet.main([f'data={target}', *WORDS]) == 2
    told = capsys.readouterr()
    assert text in told.err and 'Traceback' not in told.out + told.err


def test_the_real_command_ends_with_2_and_no_traceback(forks, folder):
    truncate('images/b.jpg', 0.5)(folder)
    process = start_script({'data': folder, **TINY}, 'output.txt')
    process.join(120)
    told = Path('output.txt').read_text()
    assert process.exitcode == 2, told
    assert 'images/b.jpg' in told and 'Traceback' not in told


def test_a_set_that_is_a_link_to_itself_is_told_in_a_line(capsys):
    os.symlink('loop', 'loop')
    assert train_unet.main(['data=loop']) == 2 and 'loop' in capsys.readouterr().err
