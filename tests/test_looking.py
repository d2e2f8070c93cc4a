"""Data: looking at all of it once. The scan and its cache, what is told of a whole set, and copies in several splits.

Run: python -m pytest tests/test_looking.py
"""
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
import tifffile

import train_unet
from conftest import TINY, draw_set
from helpers import DISC, WORDS, ask, block, coded_set, dataset, disc_set, eyes, fill, inspect, mask_of, names_of
from helpers import noisy_jpeg, noisy_reds, offered, palette_mask, save, typed, typed_lines, with_masks
from train_unet import DataError


# --- the scan -------------------------------------------------------------------------


@pytest.mark.parametrize('drawn, sides', [
    ({}, (1, 2)), ({'swapped': 20}, (2, 1)), ({'swapped': 4}, ()), ({'radii': (6, 8)}, ()), ({'radii': (8, 6)}, ()),
    ({'shown': 8}, ()), ({'count': 40, 'shown': 15}, ()), ({'count': 11}, ())])
def test_classes_that_differ_by_their_side_are_found(tmp_path, drawn, sides):
    """As eyes do, unless they change places in some masks, or differ in size, or the masks that show both are few."""
    assert inspect(eyes(tmp_path / 'set', **drawn))[1].sides == sides


def test_classes_of_one_place_or_of_no_image_have_no_side(tmp_path):
    """Layers from side to side have one middle; a set may have no training images at all."""
    layers = np.repeat(np.uint8([[0], [1], [2], [0]]), 10, axis=0) * np.ones((1, 40), np.uint8)
    assert inspect(with_masks(tmp_path / 'set', [layers] * 20))[1].sides == ()
    assert train_unet.find_sides([], {}) == ()


def test_where_a_class_lies_is_told_by_some_rows_of_a_large_mask():
    codes = np.zeros((1000, 50), np.uint8)
    codes[:, 40:] = 7
    assert train_unet.places_across(codes, np.array([0, 7])) == [pytest.approx(19.5 / 49, abs=1e-3),
                                                                 pytest.approx(44.5 / 49, abs=1e-3)]
    codes[1] = 9
    assert train_unet.places_across(codes, np.array([0, 7, 9]))[2] == 0.5      # in no row that is looked at


def test_check_decodes_large_images_one_at_a_time(tmp_path, monkeypatch):
    """As masks: eight scans of 200 megapixels would want 10 GB."""
    config, _, _ = train_unet.resolve_config(None, {'data': str(draw_set(tmp_path / 'set', count=70, size=8))})
    pairs, scan_pair, at_work, most = train_unet.find_pairs(config), train_unet.scan_pair, [], []

    def read(path, config):
        at_work.append(path)
        most.append(len(at_work))
        time.sleep(0.005)
        at_work.remove(path)

    monkeypatch.setattr(train_unet, 'scan_pair', lambda *pair: scan_pair(*pair) | {'size': [5000, 5000]})
    monkeypatch.setattr(train_unet, 'read_image', read)
    monkeypatch.setattr(train_unet, 'num_cores', lambda: 4)
    train_unet.look_at(pairs.images, pairs.masks, config, decode=True)
    assert len(most) == 70 and max(most) == 1


@pytest.mark.parametrize('suffix', ['.npy', '.tif'])
def test_pixels_of_images_are_left_alone_by_the_first_look(tmp_path, monkeypatch, suffix):
    """Only headers: a folder of large scans starts quickly."""
    folder = tmp_path / 'set'
    for n in range(4):
        save(folder / f'masks/{n}.png', np.eye(8, k=n))      # else they might be copies
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


def test_masks_of_another_shape_are_not_rescaled(small_set):
    save(small_set / 'masks/003.png', np.zeros((40, 50)))
    assert 'of another shape' in str(ask(small_set, rescale_masks=True))
    assert 'stretch' not in str(ask(small_set))                        # one file more likely belongs elsewhere


def test_masks_that_were_squeezed_into_one_size(tmp_path):
    """Photographs of any shape, of whose masks somebody made squares. The line is told; stretched when asked."""
    for n in range(4):
        save(tmp_path / f'set/images/{n}.png', np.zeros((20, 20 + 10 * n, 3)))
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.arange(100).reshape(10, 10) % 10 > 4))
    assert offered(ask(tmp_path / 'set'), 'rescale') == 'rescale_masks=stretch'
    for words in (['--rescale-masks', 'stretch'], ['rescale_masks=STRETCH']):
        config = train_unet.resolve_config(None, train_unet.parse_overrides(words)[0])[0]
        assert config['rescale_masks'] == 'stretch'
    with pytest.raises(train_unet.ConfigError, match='choose from True, False, stretch'):
        train_unet.resolve_config(None, {'rescale_masks': 'strech'})
    data, _ = dataset(tmp_path / 'set', rescale_masks='stretch')
    for image, mask in map(data.read, range(len(data))):
        assert image.shape[:2] == mask.shape and (mask == (np.arange(mask.shape[1]) >= mask.shape[1] // 2)).all()


def test_masks_that_were_squeezed_into_the_size_that_most_images_have(tmp_path):
    for n, width in enumerate([20] * 6 + [30, 40, 50]):
        save(tmp_path / f'set/images/{n}.png', np.zeros((20, width, 3)))
        save(tmp_path / f'set/masks/{n}.png', np.eye(20))
    assert offered(ask(tmp_path / 'set'), 'rescale') == 'rescale_masks=stretch'


def test_images_that_were_squeezed_into_one_size(tmp_path):
    """The masks kept their shapes."""
    for n in range(4):
        save(tmp_path / f'set/images/{n}.png', np.zeros((20, 20, 3)))
        save(tmp_path / f'set/masks/{n}.png', 255 * (np.arange(40 + 10 * n) % 10 > 4) * np.ones((30, 1)))
    assert offered(ask(tmp_path / 'set'), 'rescale') == 'rescale_masks=stretch'
    assert 'if these images were squeezed to 20 x 20' in str(ask(tmp_path / 'set'))
    for n in range(4, 9):                                              # most masks fit: the others are wrong
        save(tmp_path / f'set/images/{n}.png', np.zeros((20, 20, 3)))
        save(tmp_path / f'set/masks/{n}.png', np.eye(20))
    assert 'rescale_masks' not in str(ask(tmp_path / 'set'))


def set_of_sizes(folder, images, masks):
    """Images and masks of these sizes, (height, width) of each."""
    for number, sizes in enumerate(zip(images, masks)):
        for kind, (height, width) in zip(('images', 'masks'), sizes):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            shown = np.zeros((height, width), np.uint8)
            shown[:height // 2] = 255
            PIL.Image.fromarray(shown).save(folder / kind / f'{number}.png')
    return folder


def test_masks_that_have_the_sizes_of_other_images_are_not_offered_to_be_rescaled(tmp_path):
    """Numbered otherwise: two that were of like shapes were rescaled, and trained with wrong images."""
    images = [(37, 49), (80, 80), (30, 30), *[(40, 40)] * 6]
    folder = set_of_sizes(tmp_path / 'set', images, [(80, 80), (30, 30), (80, 81), *images[3:]])
    error = ask(folder)
    assert '2 of these masks have the size of another of these images' in str(error)
    assert 'rescale_masks' not in str(error) and 'skip_broken=True' in str(error)
    images = [(80, 80), (40, 40)] * 3                                  # of which half have the size of a mask
    halves = [(height // 2, width // 2) for height, width in images]
    assert offered(ask(set_of_sizes(tmp_path / 'halves', images, halves)), 'rescale') == 'rescale_masks=True'
    sizes = [(40, 30), (30, 40), (40, 50), (50, 40)]
    turned = set_of_sizes(tmp_path / 'turned', sizes, [size[::-1] for size in sizes])
    assert 'of another of these' not in str(ask(turned))


def test_masks_of_many_other_shapes_are_offered_to_be_stretched(tmp_path):
    images = [(40, 120 + number) for number in range(5)]
    folder = set_of_sizes(tmp_path / 'set', images, [(30 + number, 32) for number in range(5)])
    assert offered(ask(folder), 'rescale') == 'rescale_masks=stretch'
    inspect(folder, rescale_masks='stretch')


@pytest.mark.parametrize('quality', [30, 75, 95])
def test_colours_of_whole_scenes_saved_as_jpeg_are_no_photographs(tmp_path, quality):
    """A quarter of the pixels have a colour of their own there."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:240, :320]
    colours = random.integers(0, 256, (12, 3), np.uint8)
    for number in range(3):
        places, classes = random.random((30, 2)) * (240, 320), random.integers(0, 12, 30)
        nearest = np.argmin((y[..., None] - places[:, 0]) ** 2 + (x[..., None] - places[:, 1]) ** 2, -1)
        for kind, array in (('images', random.integers(0, 256, (240, 320, 3))), ('masks', colours[classes[nearest]])):
            (tmp_path / 'set' / kind).mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(array.astype(np.uint8)).save(tmp_path / f'set/{kind}/{number}.jpg', quality=quality)
    error = str(ask(tmp_path / 'set'))
    assert 'photograph,' not in error and 'the masks are JPEG' in error


def test_photographs_as_masks_are_named_before_their_colours_are_counted(tmp_path):
    """images= and masks= the wrong way round: the table of their colours grew until memory was full."""
    y, x = np.mgrid[:128, :128]
    for number in range(4):
        noise = np.random.default_rng(number).normal(0, 9, (128, 128, 3))
        light = np.stack([y * 1.9, x * 1.9, (y + x) * 0.9], 2) + noise
        disc = (y - 64) ** 2 + (x - 64) ** 2 < 900
        for kind, array in (('drawn', 255 * disc), ('taken', light.clip(0, 255))):
            (tmp_path / 'set' / kind).mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(array.astype(np.uint8)).save(tmp_path / f'set/{kind}/{number}.png')
    swapped = {'images': 'drawn', 'masks': 'taken'}
    assert re.search(r'taken/0.png: looks like a photograph, of [\d,]+ different values: are images and masks swapped',
                     str(ask(tmp_path / 'set', **swapped)))
    inspect(tmp_path / 'set', **swapped, mask_values='>127')           # whoever means it says what they hold
    inspect(tmp_path / 'set', images='taken', masks='drawn')


@pytest.mark.parametrize('change', [lambda x: x[::-1, ::-1], lambda x: x.swapaxes(0, 1), lambda x: x[:, ::-1], None],
                         ids=['turned by 180 degrees', 'by 90, mirrored', 'mirrored', 'saved anew as JPEG'])
def test_copies_that_were_turned_mirrored_or_saved_anew_stay_on_one_side(tmp_path, change):
    """No name tells of them: 0 to 9, and the same from 10 to 19."""
    for n in range(10):
        photo = cv2.resize(np.random.default_rng(n).integers(0, 256, (6, 8, 3), np.uint8), (48, 36))
        mask = np.zeros((36, 48))
        mask[4:20 + n, 6:30] = 255
        for number in (n, n + 10):
            is_copy = number != n and change
            turned = change(mask) if is_copy else mask
            save(tmp_path / f'masks/{number}.png', np.stack([turned] * 3, 2) if is_copy else turned)   # as RGB
            path = tmp_path / f'images/{number}.png'
            save(path, change(photo) if is_copy else photo)
            if number != n and not change:
                PIL.Image.open(path).save(path.with_suffix('.jpg'), quality=95, subsampling=0)
                path.unlink()
    data = inspect(tmp_path, seed=1)[1]
    train, val = ({int(name) % 10 for name in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)
    assert '10 images with copies, such as' in str(data.notes)


def test_copies_of_one_image_are_counted(tmp_path):
    """Nine of ten files show one image: said was "1 image with copies"."""
    for n in range(10):
        save(tmp_path / f'images/{n}.png', np.random.default_rng(n == 4).integers(0, 256, (32, 48, 3), np.uint8))
        save(tmp_path / f'masks/{n}.png', block(1))
    assert '1 image with copies (8 in all), such as' in str(inspect(tmp_path)[1].notes)


def test_copies_are_found_among_images_whose_masks_have_the_same_counts(tmp_path):
    """Two photographs with masks of one size, and the first of them mirrored, in a split that is given."""
    photos = [cv2.resize(np.random.default_rng(n).integers(0, 256, (4, 6, 3), np.uint8), (48, 32)) for n in range(3)]
    for place, photo in {'train/0': photos[0], 'train/1': photos[1], 'val/2': photos[1][:, ::-1],
                         'val/3': photos[2]}.items():
        save(tmp_path / f'images/{place}.png', photo)
        save(tmp_path / f'masks/{place}.png', block(255))
    told = [note for note in inspect(tmp_path)[1].notes if 'trained on too' in note]
    assert len(told) == 1 and '1 image of validation' in told[0] and '2.png as' in told[0] and '1.png' in told[0]


def test_noise_of_one_kind_is_no_copy(tmp_path):
    """Different images whose pixels, sorted, are alike, with masks of the same counts."""
    for n, split in enumerate(('train', 'val')):
        noise = np.random.default_rng(n).permutation(32 * 48 * 3).reshape(32, 48, 3) % 256
        save(tmp_path / f'images/{split}/{n}.png', noise)
        save(tmp_path / f'masks/{split}/{n}.png', block(255))
    assert 'trained on too' not in str(inspect(tmp_path)[1].notes)


@pytest.mark.parametrize('others, count', [(0, 150), (150, 0)])
def test_of_many_turned_copies_not_all_are_looked_at(tmp_path, monkeypatch, others, count):
    """150 pairs that are turned copies, or only have masks with the same counts."""
    turned = lambda array, number: array if number < 150 else array[::-1]
    for number in range(300):
        n = number % 150
        draw = np.random.default_rng(number if others else n)
        mask = np.zeros((8, 12, 3), np.uint8)
        mask[:4, :6].reshape(-1)[:] = 255
        mask[5, 0] = n + 1, 0, 1                                       # no two pairs are of one kind
        save(tmp_path / f'images/{number}.png', turned(draw.integers(0, 256, (8, 12, 3)), number))
        save(tmp_path / f'masks/{number}.png', turned(mask, number))
    read, real = [], train_unet.read_image
    monkeypatch.setattr(train_unet, 'read_image', lambda path, config: read.append(path) or real(path, config))
    notes = str(inspect(tmp_path, mask_values='nonzero')[1].notes)
    assert (f'{count} images with copies' in notes) == bool(count) and ('copies' in notes) == bool(count)
    assert 100 < len(read) <= 202


def test_images_whose_masks_are_alike_are_no_copies(tmp_path):
    """Eight pictures of one scene of which each has the same mask."""
    for n in range(8):
        save(tmp_path / f'images/{n}.png', np.random.default_rng(n).integers(0, 256 - 9 * n, (32, 48, 3)))
        save(tmp_path / f'masks/{n}.png', block(255))
    assert 'copies' not in str(inspect(tmp_path)[1].notes)


def test_a_photograph_among_the_masks_is_told(tmp_path):
    """Somebody painted on a picture and saved it as its mask: all of it would be foreground."""
    for n in range(10):
        mask = np.zeros((64, 64, 3))
        mask[8:40, 8:40] = 255, 0, 0
        photo = np.random.default_rng(n).integers(0, 256, (64, 64, 3))
        save(tmp_path / f'images/{n}.png', photo)
        save(tmp_path / f'masks/{n}.png', mask if n != 3 else (photo + 5) % 256)
    note, = [note for note in inspect(tmp_path, mask_values='nonzero')[1].notes if 'photograph' in note]
    assert note.startswith(str(tmp_path / 'masks/3.png')) and 'far more than the others' in note


# --- its cache ------------------------------------------------------------------------


def scanned(monkeypatch, folder):
    """Stems of the masks that are read when the folder is looked at."""
    seen, real = [], train_unet.scan_pair
    spy = lambda image, mask, config: seen.append(Path(mask).stem) or real(image, mask, config)
    monkeypatch.setattr(train_unet, 'scan_pair', spy)
    inspect(folder)
    monkeypatch.setattr(train_unet, 'scan_pair', real)
    return sorted(seen)


@pytest.mark.parametrize('suffix', ['.npy', '.tif'])
def test_the_header_of_an_array_tells_channels_that_do_not_fit(tmp_path, suffix):
    """Before the training, with all of them; it was the first one met in mid-run."""
    for n in range(12):
        pixels = np.zeros((8, 8, 5 if n > 8 else 3), np.uint8)
        (tmp_path / 'images').mkdir(exist_ok=True)
        path = tmp_path / f'images/{n:02}{suffix}'
        np.save(path, pixels) if suffix == '.npy' else tifffile.imwrite(path, pixels, photometric='minisblack',
                                                                        planarconfig='contig')
        save(tmp_path / f'masks/{n:02}.png', np.eye(8))
    error = str(ask(tmp_path))
    assert all(f'{n:02}{suffix}: has 5 channels, in_channels=3' in error for n in (9, 10, 11)) and '3 of 12' in error
    _, data = inspect(tmp_path, skip_broken=True)
    assert len(data.pairs.images) == 9 and 'type in_channels' not in ' '.join(data.notes)


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


def test_the_same_set_by_its_whole_path_is_not_looked_at_again(monkeypatch, small_set):
    """A resume, or evaluate, reads the data by the whole path, whatever was typed for the training."""
    monkeypatch.chdir(small_set.parent)
    inspect(Path(small_set.name))
    assert scanned(monkeypatch, small_set) == []


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


def test_an_object_mask_that_becomes_a_link_to_an_older_file_is_seen(tmp_path):
    """Of the same size: the folder's newest file stays the newest."""
    for name in ('older', 'masks/a', 'masks/b'):
        save(tmp_path / f'{name}.npy', np.full((8, 8), 255, np.uint8))
    before = train_unet.fingerprint(str(tmp_path / 'masks'))
    os.remove(tmp_path / 'masks/a.npy')
    os.symlink(tmp_path / 'older.npy', tmp_path / 'masks/a.npy')
    assert train_unet.fingerprint(str(tmp_path / 'masks')) != before


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


def test_a_user_without_a_home_needs_no_cache_of_his_own(monkeypatch, small_set):
    """As in a container that runs under a number that no user has."""
    def unknown(number):
        raise KeyError(f'uid not found: {number}')

    for key in ('XDG_CACHE_HOME', 'HOME'):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr('pwd.getpwuid', unknown)
    monkeypatch.setattr(tempfile, 'tempdir', str(small_set.parent / 'tmp'))
    config, data = inspect(small_set)
    assert len(data.pairs.images) == 12 and train_unet.cache_file(config).is_relative_to(small_set.parent / 'tmp')
    assert train_unet.cache_file(config).exists()


def test_validation_that_is_ignored_altogether_is_told(tmp_path):
    """It was said to score 0 where the class is found."""
    for side, mask in (('train', np.eye(8, dtype=int)), ('val', np.full((8, 8), 255))):
        for n in range(3):
            save(tmp_path / f'images/{side}/{n}.png', np.full((8, 8, 3), 9 * n))
            save(tmp_path / f'masks/{side}/{n}.png', mask)
    notes = inspect(tmp_path, mask_values={1: 1, 255: 255})[1].notes
    assert [note for note in notes if 'validation' in note] == [
        'all pixels of the validation masks are ignored: no epoch has a score, and the last one is kept']


# --- files that cannot be read --------------------------------------------------------


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


@pytest.mark.parametrize('count, is_offered', [(4, True), (5, False)])
def test_to_leave_out_most_of_a_set_is_not_offered(tmp_path, count, is_offered):
    """Of photographs as masks, say, the few that pass for masks would be left, and the next line offers to cut them."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=8)
    for n in range(count):
        save(folder / f'masks/{n}.png', np.zeros((5, 9)))
    assert ('skip_broken=True' in str(ask(folder))) == is_offered


def test_files_without_a_partner_do_not_hide_broken_ones(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=8)
    (folder / 'masks/0.png').unlink()
    (folder / 'images/1.png').write_bytes(b'')
    save(folder / 'masks/2.png', np.zeros((5, 9)))
    told = str(ask(folder))
    assert re.search(r'image without a mask: .*images/0.png', told) and re.search(r'images/1.png: .*empty', told)
    assert re.search(r'images/2.png: is 16 x 4 pixels, its mask .* 9 x 5', told)
    assert 'skip_unpaired=True' in str(typed_lines(ask(folder))) and 'skip_broken' not in told     # one after the other
    assert 'to leave them out type skip_broken=True' in str(ask(folder, skip_unpaired=True))
    pointer = 'version https://git-lfs.github.com/spec/v1'
    (folder / 'masks/3.png').write_text(pointer)                       # what is wrong with it names a line too
    assert 'masks/3.png: cannot be read: is a pointer of Git LFS, not the file: type git lfs pull' in str(ask(folder))


def test_a_damaged_tiff_is_told_of_by_its_name_alone(small_set, capfd, caplog):
    path = next((small_set / 'images').glob('*'))
    path.unlink()
    path.with_suffix('.tif').write_bytes(b'II*\0\xff\xff\xff\x7f' + bytes(50))
    assert train_unet.main(['check', f'data={small_set}', *WORDS]) == 2
    assert f'{path.stem}.tif: cannot be read' in capfd.readouterr().err
    assert not [record for record in caplog.records if record.name == 'tifffile']


def no_waiting(monkeypatch):
    """A file that fails is tried again at once."""
    monkeypatch.setattr(train_unet.time, 'sleep', lambda seconds: None)


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


def test_a_cut_image_is_left_out_by_the_line_that_a_training_prints(small_set, capsys, caplog):
    path = sorted((small_set / 'images').iterdir())[0]
    path.write_bytes(path.read_bytes()[:-60])                          # its header is sound
    words = [f'data={small_set}', *WORDS, 'num_epochs=1', 'run_dir=run']
    assert train_unet.main(words) == 2
    line, = re.findall(r'(\S+) leaves out files that cannot be read', capsys.readouterr().err)
    assert train_unet.main([*words, line]) == 0
    assert f'left out: {path}: cannot be read' in caplog.text


# --- images of several kinds ----------------------------------------------------------


def test_images_of_8_bits_beside_those_of_16_are_told(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    told = lambda: [note for note in inspect(folder)[1].notes if '8 bits' in note]
    assert not told()
    PIL.Image.fromarray(np.full((6, 16), 4095, np.uint16)).save(folder / 'images/0.png')
    assert told()[0].startswith('some images have 8 bits, others 16, all of which become 0 to 1')


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
    assert not any('alpha' in note for note in data.notes)
    assert (train_unet.read_image(folder / 'images/0.tif', {**config, 'image_dtype': 'uint8'}) == bands).all()


def test_near_infrared_that_a_tiff_calls_alpha_is_told_of(tmp_path):
    for number in range(4):
        (tmp_path / 'images').mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f'images/{number}.tif', np.full((32, 48, 4), number, np.uint8), photometric='rgb',
                         extrasamples=['unassalpha'])
        save(tmp_path / f'masks/{number}.png', block(255))
    assert 'band 4 of the images is taken for alpha and left out; in_channels=4 takes it' in inspect(tmp_path)[1].notes
    assert not any('alpha' in note for note in inspect(tmp_path, in_channels=4)[1].notes)


def test_a_thermal_band_in_a_png_is_told_of(tmp_path):
    """MFNet keeps it where a PNG has its alpha."""
    for number in range(4):
        save(tmp_path / f'images/{number}.png', np.random.default_rng(number).integers(0, 255, (32, 48, 4)))
        save(tmp_path / f'masks/{number}.png', block(255))
    assert any('in_channels=4 takes it' in note for note in inspect(tmp_path)[1].notes)
    assert not any('alpha' in note for note in inspect(tmp_path, in_channels=4)[1].notes)


def test_a_second_page_that_is_left_out_as_alpha_is_told(tmp_path):
    for number in range(6):
        (tmp_path / 'images').mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f'images/{number}.tif', np.zeros((2, 8, 8), np.uint8), photometric='minisblack')
        save(tmp_path / f'masks/{number}.png', 255 * np.eye(8))
    assert 'band 2 of the images is taken for alpha and left out; in_channels=2 takes it' in \
        inspect(tmp_path, in_channels=1)[1].notes


# --- masks of several kinds -----------------------------------------------------------


def typed_words(words):
    """Overrides of a line that is split already."""
    overrides, others = train_unet.parse_overrides(words)
    assert not others
    return overrides


@pytest.mark.parametrize('top, mark, is_told', [(4, 77, True), (2, 255, True), (4, 250, False)])
def test_a_mask_coded_unlike_all_others_is_named(tmp_path, top, mark, is_told):
    """Of thirty masks 77 was said to be in "1 images", and the user went to look for it."""
    for n in range(12):
        pixels = np.arange(64).reshape(8, 8) // 5 % top
        is_odd = n == 7 or not is_told and n > 3                       # where most are odd none is
        save(tmp_path / f'images/{n}.png', np.full((8, 8, 3), 20 * n))
        save(tmp_path / f'masks/{n}.png', np.where(pixels > 0, mark, 0) if is_odd else pixels)
    named = [line for line in ask(tmp_path).problems if 'which hardly any other mask does' in line]
    assert named == [f'{tmp_path}/masks/7.png: holds {mark}, which hardly any other mask does'] * is_told


def test_odd_masks_are_named_only_where_few_are_odd():
    named = lambda masks: train_unet.odd_masks(masks, [b'%d.png' % n for n in range(40)])
    assert len(named([[0, 1]] * 37 + [[0, n] for n in (7, 8, 9)])) == 3
    assert named([[0, 1]] * 36 + [[0, n] for n in (6, 7, 8, 9)]) == [] == named([[0, 1]] * 37 + [[0, 9]] * 3)
    assert len(named([[0, 1]] * 3 + [[0, 2]])) == 1 and named([[0, 1]] * 2 + [[0, 2]]) == []
    assert named([[0, 1]] * 39 + [[0, 6, 5, 4, 3, 2]]) == [
        '39.png: holds 2, 3, 4, 5, ..., which hardly any other mask does']


def test_a_mask_that_alone_ignores_pixels_is_not_named_for_a_class_too_many(tmp_path):
    for n in range(12):
        save(tmp_path / f'images/{n}.png', np.full((8, 8, 3), 20 * n))
        classes = np.arange(64).reshape(8, 8) // 13
        save(tmp_path / f'masks/{n}.png', classes if n else np.where(np.eye(8), 255, classes))
    told = str(ask(tmp_path, num_classes=3))
    assert 'the mask values are not clear' in told and '0.png' not in told


def test_a_plane_for_each_of_three_classes_keeps_their_order(tmp_path):
    """As (H, W, 3) they are read as colours; the first line offered made the last plane class 0."""
    (tmp_path / 'masks').mkdir()
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.full((8, 8, 3), 20 * n))
        np.save(tmp_path / f'masks/{n}.npy', np.eye(3, dtype=np.uint8)[np.arange(64).reshape(8, 8) // 10 % 3])
    assert "\"{'#010000': 0, '#000100': 1, '#000001': 2}\"" in str(ask(tmp_path))


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


def test_masks_of_classes_beside_others_of_black_and_white_are_asked_for(tmp_path):
    """255 was ignored, which was all the foreground of half of the masks."""
    for n in range(6):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        mask = np.diag([1, 1, 1, 1, 2, 2, 2, 2]) if n % 2 else 255 * np.eye(8)
        save(tmp_path / f'masks/{n}.png', mask)
    error = ask(tmp_path)
    assert '3 masks hold 0 and 255, others classes up to 2, none both' in str(error)
    meant = [{*mask_of(data, config, '0').ravel().tolist()} for config, data in (
        inspect(tmp_path, **typed_words(shlex.split(line.split(' type ')[1])))
        for line in error.problems if ' type ' in line)]
    assert meant == [{0, 1}, {0, 255}]
    save(tmp_path / 'masks/1.png', np.diag([1, 1, 1, 255, 2, 2, 2, 2]))        # an ignored pixel beside classes
    assert inspect(tmp_path)[1].coding.num_classes == 3


@pytest.mark.parametrize('quality', [60, 90, 100])
def test_black_and_white_as_jpeg_beside_masks_of_0_and_1_is_refused_however_little_its_noise(tmp_path, quality):
    """Few masks with few values of noise made background of all that is 1."""
    for n in range(12):
        mask = np.hypot(*np.mgrid[-24:24, -24:24]) < 3 + 2 * (n % 5)
        save(tmp_path / f'images/{n}.png', np.full((48, 48, 3), n))
        if n % 3:
            PIL.Image.fromarray(np.uint8(255 * mask)).save(tmp_path / f'masks/{n}.jpg', quality=quality)
        else:
            save(tmp_path / f'masks/{n}.png', mask)
    assert '4 masks hold 0 and 1, 8 others 0 and 255' in str(ask(tmp_path))


@pytest.mark.parametrize('classes', [2, 4])
def test_numbers_in_some_masks_and_colours_in_others_are_no_table_of_both(tmp_path, classes):
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    mask = np.repeat(np.arange(16) % classes, 16).reshape(16, 16)
    for n in range(8):
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        save(tmp_path / f'masks/{n}.png', colours[mask] if n % 2 else mask)
    assert 'others colours: if both mean the same classes save all of them alike' in str(ask(tmp_path))
    for n in range(1, 8, 2):                                           # numbers all the same, in three channels
        save(tmp_path / f'masks/{n}.png', np.repeat((mask + mask // 3)[..., None], 3, 2))
    assert inspect(tmp_path)[1].coding.num_classes == {2: 2, 4: 5}[classes]
    for n in range(1, 8, 2):
        save(tmp_path / f'masks/{n}.png', colours[mask])
    for n in range(0, 8, 2):                                           # black alone, which an editor saves in grey
        save(tmp_path / f'masks/{n}.png', 0 * mask)
    assert 'others colours' not in str(ask(tmp_path))


@pytest.mark.parametrize('swapped', [range(1), range(6), range(0)])
def test_masks_drawn_the_other_way_round_are_told(tmp_path, swapped):
    for n in range(12):
        save(tmp_path / f'images/{n:02d}.png', np.zeros((20, 20, 3)))
        mask = np.zeros((20, 20))
        mask[5:11, 6:12 + n % 3] = 255
        save(tmp_path / f'masks/{n:02d}.png', 255 - mask if n in swapped else mask)
    told = [note for note in inspect(tmp_path)[1].notes if 'foreground along the edges' in note]
    assert [note.split(' mask')[0] for note in told] == [str(len(swapped))] * bool(swapped)
    assert all('masks/00.png, ' in note and f'{12 - len(swapped)} with background' in note for note in told)


def test_objects_that_are_cut_by_the_edge_are_not_called_inverted(tmp_path):
    for n in range(12):
        save(tmp_path / f'images/{n:02d}.png', np.zeros((20, 20, 3)))
        mask = np.zeros((20, 20))
        mask[:, :2 * n] = 255                                          # from none to nearly all
        save(tmp_path / f'masks/{n:02d}.png', mask)
    assert not [note for note in inspect(tmp_path)[1].notes if 'foreground along the edges' in note]


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


def test_ones_of_8_bits_beside_white_of_16_are_asked_about(tmp_path):
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8, dtype=int) * (65535, 1)[number % 2], ('I;16', 'L')[number % 2])
    _, data = inspect(tmp_path, **typed(offered(ask(tmp_path), 'mask_values=')))
    assert data.coding.num_classes == 2 and data.classes[1][1] == 12


def test_white_of_16_bits_is_that_of_8_and_of_one(tmp_path):
    for number, top in enumerate([65535, 255, 1] * 4):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8, dtype=int) * top, {65535: 'I;16', 255: 'L', 1: '1'}[top])
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 2 and data.classes[1][1] == 12


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


def test_empty_masks_of_one_bit_beside_black_and_white_ones_are_nothing_to_ask_about(tmp_path):
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.eye(8) * 255 * (number % 2), None if number % 2 else '1')
    assert inspect(tmp_path)[1].coding.table == {0: 0, 255: 1} | {
        train_unet.COLOUR: 0, train_unet.COLOUR + 0xffffff: 1}


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


def test_masks_of_one_bit_beside_colours_are_asked_about(tmp_path):
    """What makes files small cuts those of black and white to one bit: no line may tell its black from the others'."""
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        colours = np.array([[0] * 3, [255] * 3, [255, 0, 0]])
        save(tmp_path / f'masks/{number}.png', np.eye(8) if number % 2 else colours[np.arange(64).reshape(8, 8) % 3],
             '1' if number % 2 else None)
    assert 'save all of them alike' in str(ask(tmp_path))


# --- palettes that differ from file to file -------------------------------------------


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


def test_palettes_that_number_their_colours_anew_are_refused(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{n}.png', np.arange(64).reshape(8, 8) % 3, 'P')
        with PIL.Image.open(tmp_path / f'masks/{n}.png') as mask:
            mask.putpalette([0, 0, 0, *([255, 0, 0, 0, 255, 0] if n % 2 else [0, 255, 0, 255, 0, 0])])
            mask.save(tmp_path / f'masks/{n}.png')
    error = ask(tmp_path)
    assert 'palette masks number their colours anew in each file' in error.problems
    assert 'if it is the numbers that count type mask_values=' in str(error)
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values="{')))
    for n in range(4):                                                 # as black, green and red mean it
        numbers = np.arange(64).reshape(8, 8) % 3
        assert np.array_equal(mask_of(data, config, str(n)), np.array([[0, 1, 2], [0, 2, 1]])[n % 2][numbers])
    assert inspect(tmp_path, mask_values={0: 0, 1: 1, 2: 2})[1].coding.num_classes == 3


def test_one_colour_under_two_numbers_is_enough_if_one_of_them_means_another_too(tmp_path):
    """As pngquant leaves masks of one class each: number 1 is that class, 2 the second of the few that hold both."""
    red, green, black = (200, 0, 0), (0, 200, 0), (0, 0, 0)
    masks = [(block(1), [black, red]), (block(1), [black, green]), (block(1) + block(1, 8), [black, red, green])]
    for n, (numbers, colours) in enumerate(masks):
        save(tmp_path / f'images/{n}.png', np.zeros((32, 48, 3)) + n)
        palette_mask(tmp_path / f'masks/{n}.png', numbers, colours)
    error = ask(tmp_path)
    assert 'number their colours anew' in str(error)
    assert {'#00c800', '#c80000'} < typed(offered(error, 'mask_values='))['mask_values'].keys()


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


@pytest.mark.parametrize('kind', ['L', '1', 'RGB'])
def test_black_that_was_saved_in_grey_is_the_black_of_colours(tmp_path, kind):
    """An editor that saves what is all black in grey, or with one bit, and the rest in colour."""
    colours = np.array([[0, 0, 0], [255, 0, 0]], np.uint8)[block(1).astype(int)]
    masks = [PIL.Image.fromarray(colours * (n % 2)) for n in range(4)]
    folder = with_masks(tmp_path, [mask.convert('RGB' if n % 2 else kind) for n, mask in enumerate(masks)])
    settings = typed(offered(ask(folder), 'mask_values='))
    assert settings == {'mask_values': {'#000000': 0, '#ff0000': 1}}
    config, data = inspect(folder, **settings)
    assert data.coding.num_classes == 2 and [mask_of(data, config, str(n)).sum() for n in range(4)] == [0, 256, 0, 256]


def test_numbers_of_palettes_beside_colours_stay_numbers(tmp_path):
    """Classes 0 to 2 of a palette are no colours #000000 to #020202."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((32, 48, 3)) + n)
        save(tmp_path / f'masks/{n}.png', np.dstack([block(255 - n)] * 2 + [block(0)]))
    palette_mask(tmp_path / 'masks/3.png', block(2), [(0, 0, 0), (9, 99, 9), (99, 9, 9)])
    assert "0 (" in str(ask(tmp_path)) and '#020202' not in str(ask(tmp_path))


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


def test_colours_of_the_palettes_of_other_masks_are_asked_about_by_colour(tmp_path):
    """As annotation tools save them: most RGBA, some with a palette of these colours."""
    colours = [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    for number in range(10):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        picture = PIL.Image.fromarray((np.arange(64).reshape(8, 8) % 3).astype(np.uint8), 'P')
        picture.putpalette(sum(map(list, colours), []))
        (tmp_path / 'masks').mkdir(exist_ok=True)
        (picture if number % 3 else picture.convert('RGBA')).save(tmp_path / f'masks/{number}.png')
    error = ask(tmp_path)
    assert 'some masks number their colours in a palette, others hold colours' in error.problems
    assert 'if it is the numbers' not in str(error)                    # colours have none
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values="{')))
    assert data.coding.num_classes == 3 and {images for _, images in data.classes.values()} == {10}
    masks = [data.coding.encode(train_unet.read_mask(tmp_path / f'masks/{n}.png', config)) for n in range(10)]
    assert all((mask == masks[1]).all() for mask in masks)
    _, data = inspect(tmp_path, mask_values={'#000000': 0, '#800000': 1, '#008000': 1})
    assert data.classes[1][1] == 10 and data.classes[1][0] == 10 * 42


# --- classes that are missing or alone ------------------------------------------------


@pytest.mark.parametrize('split', [False, True])
def test_set_without_foreground_is_refused(tmp_path, split):
    """Also where only the validation masks have some: the counts are those of training."""
    for n in range(4):
        place = f'{("train", "val")[n % 2]}/{n}.png' if split else f'{n}.png'
        save(tmp_path / f'set/images/{place}', np.zeros((8, 8, 3)))
        save(tmp_path / f'set/masks/{place}', np.eye(8) * 255 * (split and n % 2))
    with pytest.raises(DataError, match='every pixel of the training masks is of one class') as caught:
        dataset(tmp_path / 'set')
    found = '255 foreground' if split else 'and there is nothing else'
    assert f'masks: 0 is background, {found}\n' in str(caught.value)
    inspect(tmp_path / 'set')                                          # evaluate may score it


def test_a_set_of_one_class_is_refused(tmp_path):
    folder = disc_set(tmp_path / 'set', lambda n: save(tmp_path / f'set/masks/{n}.png', np.full((48, 48), 255)))
    with pytest.raises(DataError, match='every pixel of the training masks is of one class'):
        dataset(folder)


def test_foreground_in_validation_alone_is_told_of(tmp_path):
    for number in range(6):
        split = 'val' if number > 3 else 'train'
        save(tmp_path / f'{split}/images/{number}.png', np.zeros((32, 48, 3)))
        save(tmp_path / f'{split}/masks/{number}.png', block(255 * (split == 'val')))
    with pytest.raises(DataError) as caught:
        train_unet.train(data=str(tmp_path), **TINY)
    assert 'draw another split, with another seed or val_fraction' in str(caught.value)


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
    assert [note for note in data.notes if note.startswith('no training mask has class 2')]
    assert not [note for note in data.notes if re.search(r'mask has class 1\b', note)]


def test_validation_without_foreground_is_told(tmp_path):
    for split, top in (('train', 255), ('val', 0)):
        for n in range(3):
            save(tmp_path / f'set/images/{split}/{n}.png', np.zeros((48, 48, 3)))
            save(tmp_path / f'set/masks/{split}/{n}.png', top * DISC)
    _, data = inspect(tmp_path / 'set')
    assert [note for note in data.notes if note.startswith('no validation mask has class 1')]


@pytest.mark.parametrize('other, told', [(2, True), (1, False)])
def test_validation_without_class_0_is_told_where_class_0_is_scored(tmp_path, other, told):
    """Of 585 images one shows the border: the mean IoU leapt by a half when the last stray pixel of it was gone."""
    for split, values in (('train', [0, 1, other]), ('val', [1, other])):
        for n in range(3):
            pixels = np.random.default_rng([n, len(values)]).integers(0, 255, (8, 8, 3))
            save(tmp_path / f'images/{split}/{n}.png', pixels)
            save(tmp_path / f'masks/{split}/{n}.png', np.resize(values if not n else [1, other], (8, 8)))
    notes = inspect(tmp_path)[1].notes
    assert any(note.startswith('no validation mask has class 0') for note in notes) is told


def test_no_other_draw_is_advised_for_a_class_of_test_images_alone(tmp_path):
    for split, value in (('train', 1), ('test', 2)):
        for n in range(6):
            save(tmp_path / f'images/{split}/{n}.png', np.random.default_rng([n, value]).integers(0, 255, (8, 8, 3)))
            save(tmp_path / f'masks/{split}/{n}.png', np.array([[0] * 8, [value] * 8] * 4))
    note, = [note for note in inspect(tmp_path)[1].notes if note.startswith('no validation mask has class 2')]
    assert 'another seed' not in note


@pytest.mark.parametrize('named', [True, False])
def test_another_draw_is_advised_only_where_chance_drew(tmp_path, named):
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=6)
    save(folder / 'masks/0.png', np.arange(4).repeat(16).reshape(4, 16) % 3)
    if named:
        for kind, number in itertools.product(('images', 'masks'), range(6)):
            target = folder / kind / ('val' if number == 5 else 'train') / f'{number}.png'
            target.parent.mkdir(exist_ok=True)
            (folder / kind / f'{number}.png').rename(target)
    note, = [note for note in inspect(folder, num_classes=3)[1].notes
             if note.startswith('no validation mask has class 2')]
    assert ('masks/0.png alone shows it' in note) is not named and 'seed' not in note      # none gives it to both
    save(next((folder / 'masks').rglob('1.png')), np.array([0, 1, 3, 3]).repeat(16).reshape(4, 16))
    note, = [note for note in inspect(folder, num_classes=4)[1].notes if note.startswith('no validation mask has')]
    assert 'class 2, 3:' in note and 'alone shows' not in note         # each in another


# --- inverted masks -------------------------------------------------------------------


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


@pytest.mark.parametrize('wish, line', [('<128', '">127"'), ('>127', '"<128"')])
def test_the_line_for_inverted_thresholds_turns_them(tmp_path, wish, line):
    for number in range(4):
        mask = np.full((10, 10), 0 if wish == '<128' else 255)
        mask[0, 0] = 255 - mask[0, 0]
        save(tmp_path / 'set' / 'masks' / f'{number}.png', mask)
        save(tmp_path / 'set' / 'images' / f'{number}.png', np.random.default_rng(number).integers(0, 255, (10, 10, 3)))
    assert any(f'type mask_values={line}' in note for note in inspect(tmp_path / 'set', mask_values=wish)[1].notes)


def test_what_alpha_shows_gets_no_line_that_would_not_read_it(tmp_path):
    for n in range(4):
        pixels = np.zeros((16, 16, 4), np.uint8)
        pixels[1:, :, 3] = 255
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        save(tmp_path / f'masks/{n}.png', pixels)
    data = inspect(tmp_path, mask_values='alpha')[1]
    assert data.shares[1] > 0.9 and not [note for note in data.notes if 'inverted' in note]


def test_inverted_masks_of_single_objects_get_no_line_that_inverts_their_union(tmp_path):
    for number in range(4):
        save(tmp_path / f'{number}/images/{number}.png', np.zeros((16, 16, 3)))
        for place in range(2):
            mask = np.full((16, 16), 255)
            mask[2 * place:2 * place + 4, :4] = 0                      # they overlap
            save(tmp_path / f'{number}/masks/{place}.png', mask)
    notes = ' '.join(inspect(tmp_path)[1].notes)
    assert 'are the masks inverted? If so invert the files' in notes and 'mask_values=' not in notes


# --- copies ---------------------------------------------------------------------------


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
    told = [note for note in inspect(data)[1].notes if 'trained on too' in note]
    assert told == [f'trained on too: 2 images of validation or test, such as {data}/val/images/6.png as '
                    f'{whole}/images/6.png: the scores flatter'] * inside


def test_copies_in_a_folder_of_test_images_are_no_set_to_train_on(tmp_path):
    """What is named after a split is offered without the rest, but not test images alone."""
    for n in range(8):
        picture = np.random.default_rng(n).integers(0, 2, (32, 32, 3), np.uint8)
        for tail in ('', '_test') if n > 5 else ('',):
            save(tmp_path / f'images{tail}/{n}.png', picture)
            save(tmp_path / f'masks{tail}/{n}.png', picture[..., 0])
    told, = [note for note in inspect(tmp_path)[1].notes if 'trained on too' in note]
    assert told.endswith('images/6.png: the scores flatter')


def test_one_name_and_one_size_in_two_splits_is_no_copy(tmp_path):
    for seed, split in enumerate(('train', 'val')):
        for n in range(4):
            picture = np.random.default_rng((seed, n)).integers(0, 2, (32, 32, 3), np.uint8)
            save(tmp_path / f'images/{split}/{n}.tif', picture)
            save(tmp_path / f'masks/{split}/{n}.png', picture[..., 0])
    assert not [note for note in inspect(tmp_path)[1].notes if 'trained on too' in note]


def test_masks_that_differ_for_one_and_the_same_image_are_told(tmp_path):
    """Two tasks on the same photographs, in folders of their own."""
    for task, top in (('cup', 3), ('disc', 6)):
        for n in range(10):
            save(tmp_path / f'set/{task}/images/{n}.png', np.eye(8, dtype=int)[..., None].repeat(3, 2) * n)
            save(tmp_path / f'set/{task}/masks/{n}.png', np.pad(np.ones((top, 8), int), ((0, 8 - top), (0, 0))))
    _, data = inspect(tmp_path / 'set')
    assert any('has mask files that differ' in note for note in data.notes)


# --- the table of classes -------------------------------------------------------------


def test_the_table_counts_all_pixels_and_images_of_each_class(tmp_path):
    """With a threshold, too; of the validation images as well."""
    folder = draw_set(tmp_path / 'set', count=8, size=16)
    truth = [np.array(PIL.Image.open(path)) > 127 for path in sorted((folder / 'masks').iterdir())]
    for wish in (None, '>127', 'nonzero'):
        config, data = inspect(folder, mask_values=wish)
        [line] = [line for line in train_unet.describe_data(data, config) if '1 foreground' in line and '->' in line]
        assert f'{np.mean(truth):.3%}' in line and line.split()[-1] == '8'


def test_the_table_shows_every_class_where_values_are_many(tmp_path):
    """JPEG noise around two colours, of which one is named: hundreds of values."""
    config, data = inspect(noisy_reds(tmp_path / 'set'), mask_values={'#f00a0a': 1})
    lines = train_unet.describe_data(data, config)
    assert len(data.values) > 256 and any('1 foreground' in line and '50.000%' in line for line in lines)


@pytest.mark.parametrize('names, status', [("['a','b','c']", 2), ("['a']", 2), ("['a','b']", 0)])
def test_names_must_be_as_many_as_the_classes_found(small_set, capsys, names, status):
    """num_classes is still auto, so only a look at the masks tells."""
    assert train_unet.main(['check', f'data={small_set}', f'class_names={names}', *WORDS]) == status
    if status:
        told = capsys.readouterr().err
        assert 'the config cannot be used' in told and 'for 2 classes' in told
        assert f'class_names={names}'.replace(',', ', ') in told


def test_why_nothing_is_kept_in_memory_is_told(small_set, capsys):
    assert train_unet.main(['check', f'data={small_set}', 'size_policy=crop', *WORDS]) == 0
    assert re.search('cache_images +False +only resized images are kept', capsys.readouterr().out)
    assert train_unet.main(['check', f'data={small_set}', 'size_policy=crop', 'cache_images=True', *WORDS]) == 0
    assert 'cache_images=True keeps the validation images alone' in ''.join(capsys.readouterr())


@pytest.mark.skipif(sys.platform != 'linux', reason='other platforms import the script anew in a worker')
def test_check_tells_that_its_data_workers_die(small_set, monkeypatch, capsys):
    """As those of a training do: there was a traceback."""
    def die(data, key):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(train_unet.SegmentationDataset, '__getitem__', die)
    assert train_unet.main(['check', f'data={small_set}', *WORDS, 'num_workers=1']) == 2
    assert 'the data workers die' in capsys.readouterr().err and not multiprocessing.active_children()


def test_check_says_where_each_setting_came_from(small_set, capsys):
    assert train_unet.main(['check', f'data={small_set}', *WORDS, 'lr=0.01']) == 0
    origins = dict(re.findall(r'^  (\w+) .*  (\S.*)$', capsys.readouterr().out, re.MULTILINE))
    assert (origins['learning_rate'], origins['momentum'], origins['mean'], origins['num_classes'],
            origins['image_dtype'], origins['channels_last']) == (
        'you', 'default', 'of the training images', 'found in the masks', 'found in the data', 'the usual choice here')


def test_check_says_of_an_edited_size_that_it_is_the_default(small_set, capsys, monkeypatch):
    monkeypatch.setitem(train_unet.CONFIG, 'image_size', 32)           # becomes [32, 32]
    assert train_unet.main(['check', f'data={small_set}', 'encoder=tu-test_resnet', 'device=cpu']) == 0
    assert re.search(r'image_size +\[32, 32\] +default', capsys.readouterr().out)


def test_check_says_what_comes_from_a_run(own, two, capsys):
    origins = {}
    for words in ([f'resume={own}'], [f'data={two[1]}', f'initial_weights={own}', 'image_size=32', 'device=cpu']):
        assert train_unet.main(['check', *words]) == 0
        found = re.findall(r'^  (\w+) .*  (\S.*)$', capsys.readouterr().out, re.MULTILINE)
        origins[words[0].split('=')[0]] = dict(found)
    assert origins['resume']['encoder'] == origins['resume']['batch_size'] == 'the run'
    assert origins['data']['encoder'] == 'initial_weights' and origins['data']['std'] == 'of the network that goes on'


def test_patches_beside_what_they_were_cut_from_are_told(tmp_path):
    def place(folder, side, count=5):
        for n in range(count):
            save(tmp_path / f'{folder}images/{n}.png', np.full((side, side, 3), n + side))
            save(tmp_path / f'{folder}masks/{n}.png', np.eye(side))
        return [note for note in inspect(tmp_path)[1].notes if 'far smaller' in note]

    assert place('a/', 64) == place('b/', 32) == []                    # of two cameras
    for split in ('train/', 'test/'):
        assert place(split, 64) == []
    note, = place('patches/', 8)
    assert 'beside ' + str(tmp_path / 'patches/images/0.png') + ' are far smaller than those beside' in note
    save(tmp_path / 'patches/images/4.png', np.zeros((40, 40, 3)))
    save(tmp_path / 'patches/masks/4.png', np.eye(40))
    assert not [note for note in inspect(tmp_path)[1].notes if 'far smaller' in note]      # sizes that vary


def test_a_list_of_fewer_classes_than_the_masks_hold_is_told(tmp_path):
    """labelme numbers objects where it is asked to; the list has the one class of all of them."""
    for n in range(8):
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        save(tmp_path / f'masks/{n}.png', np.mgrid[:16, :16][0] // 4 % (n % 3 + 2))
    (tmp_path / 'class_names.txt').write_text('_background_\nDefect\n')
    told = f'{tmp_path}/class_names.txt lists 2 classes, the masks hold numbers up to 3: if they are ids of objects ' \
        'type mask_values=nonzero'
    assert told in inspect(tmp_path)[1].notes
    for names in ('background\nroad\nsky\ncar\n', 'road\nsky\ncar\n'):    # or without the background
        (tmp_path / 'class_names.txt').write_text(names)
        assert not [note for note in inspect(tmp_path)[1].notes if f'lists {len(names.split())} classes' in note]
    for n in range(8):
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(16))
    assert not [note for note in inspect(tmp_path)[1].notes if ' classes, the masks' in note]


@pytest.fixture(scope='module')
def cache_of_fixtures():
    return train_unet.cache_file(train_unet.CONFIG)


def test_fixtures_keep_their_records_out_of_the_users_cache(cache_of_fixtures, tmp_path_factory):
    assert cache_of_fixtures.is_relative_to(tmp_path_factory.getbasetemp())


def test_of_many_images_few_seeds_are_tried(monkeypatch):
    tried, rows = [], np.arange(100_000)
    monkeypatch.setattr(train_unet, 'hold_out', lambda groups, count, config: tried.append(config['seed']) or [0])
    lacking = lambda some: {1} if len(some) < len(rows) else set()
    assert train_unet.seed_for_all(rows, [0], lacking, train_unet.CONFIG) is None and len(tried) == 21


# --- advice that can be followed ------------------------------------------------------


def in_alpha():
    """A mask whose shape is in its alpha channel."""
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[4:10, 2:8, 3] = 255
    return pixels


@pytest.mark.parametrize('alpha', [{0}, {0, 1, 2, 3, 4}], ids=['one in alpha', 'all but one'])
def test_masks_in_alpha_beside_others_have_a_way_out(tmp_path, alpha):
    for n in range(6):
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        grey = np.zeros((16, 16), np.uint8)
        grey[4:9, 4:9] = 255
        save(tmp_path / f'masks/{n}.png', in_alpha() if n in alpha else grey)
    wish = {} if len(alpha) == 1 else typed(offered(ask(tmp_path), 'mask_values='))
    error = ask(tmp_path, **wish)
    line = offered(error, 'skip_broken=')
    assert len(inspect(tmp_path, **wish, **typed(line))[1].pairs.images) == 5


def test_masks_that_lie_turned_are_not_said_to_be_squeezed(tmp_path):
    for n in range(10):
        size = (24, 16) if n in (2, 5, 7) else (16, 24)
        save(tmp_path / f'images/{n}.png', np.zeros((*size, 3)) + n)
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(16, 24))
    error = str(ask(tmp_path))
    assert '3 of these masks have the sides of their images the other way round' in error
    assert 'rescale_masks' not in error


def test_of_one_image_with_other_channels_those_of_all_are_not_asked_for(tmp_path):
    for n in range(8):
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(16))
        save(tmp_path / f'images/{n}.png', np.zeros((16, 16, 3)) + n)
    (tmp_path / 'images/3.png').unlink()
    np.save(tmp_path / 'images/3.npy', np.zeros((16, 16, 5), np.uint8))
    with pytest.raises(train_unet.DataError) as caught:
        train_unet.inspect_data(train_unet.resolve_config(None, {**TINY, 'data': str(tmp_path)})[0], decode=True)
    assert 'has 5 channels' in str(caught.value) and 'type in_channels' not in str(caught.value)


def test_copies_outside_of_the_split_are_left_out_by_a_line_also_from_within(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for place, count in (('set/train', 6), ('set/val', 2), ('raw/train', 0)):
        for n in range(count):
            save(tmp_path / place / f'images/{place[-3:]}{n}.png', draw.integers(0, 255, (16, 16, 3)))
            save(tmp_path / place / f'masks/{place[-3:]}{n}.png', 255 * np.eye(16))
    for kind in ('images', 'masks'):
        shutil.copytree(tmp_path / 'set/val' / kind, tmp_path / 'raw/train' / kind)
    monkeypatch.chdir(tmp_path)
    note = next(note for note in inspect('.')[1].notes if 'trained on too' in note)
    assert not any('trained on too' in note for note in inspect(typed(offered(note, 'data='))['data'])[1].notes)


@pytest.fixture
def run_of_eight(tmp_path):
    for n in range(8):
        mask = np.zeros((32, 32))
        mask[4:14, 4 + n:20] = 255
        save(tmp_path / f'set/images/{n}.png', np.random.default_rng(n).integers(0, 255, (32, 32, 3)))
        save(tmp_path / f'set/masks/{n}.png', mask)
    train_unet.train(**{**TINY, 'data': str(tmp_path / 'set'), 'num_epochs': 1, 'run_dir': str(tmp_path / 'run')})
    return tmp_path / 'run'


def test_a_resume_names_the_mask_in_alpha(run_of_eight, tmp_path):
    save(tmp_path / 'set/masks/3.png', in_alpha())
    with pytest.raises(train_unet.UserError) as caught:
        train_unet.train(resume=str(run_of_eight), num_epochs=2)
    assert 'masks/3.png' in str(caught.value) and 'initial_weights' not in str(caught.value)
    assert 'mask_values' not in str(caught.value)                      # which a resume refuses


def test_evaluate_takes_a_list_of_test_images_alone(run_of_eight, tmp_path):
    rows = ''.join(f'set/images/{n}.png,set/masks/{n}.png,test\n' for n in range(8))
    (tmp_path / 'list.csv').write_text('image,mask,split\n' + rows)
    assert 'metrics' in train_unet.evaluate(str(run_of_eight), data=str(tmp_path / 'list.csv'))
    assert 'no line has split=train' in str(ask(tmp_path / 'list.csv'))
    with pytest.raises(DataError, match='in lines of other splits .without the column chance splits'):
        dataset(tmp_path / 'list.csv', val_fraction=0.0)


def test_of_most_images_with_other_channels_those_of_all_are_asked_for(tmp_path):
    for n in range(8):
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(16))
        save(tmp_path / f'images/{n}.npy', np.full((16, 16, 3 if n == 3 else 5), n, np.uint8))
    with pytest.raises(train_unet.DataError, match='type in_channels=5'):
        train_unet.inspect_data(train_unet.resolve_config(None, {**TINY, 'data': str(tmp_path)})[0], decode=True)


@pytest.mark.parametrize('turned, told', [(3, True), (2, False)])
def test_masks_are_said_to_lie_turned_where_most_do(tmp_path, turned, told):
    for n in range(12):
        size = (24, 16) if n < 5 else (16, 24)
        save(tmp_path / f'images/{n}.png', np.zeros((*size, 3)) + n)
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(*((16, 24) if n < turned or n > 4 else (8, 8))))
    assert ('the other way round' in str(ask(tmp_path))) == told


def test_where_all_masks_lie_turned_they_may_be_squeezed(tmp_path):
    for n in range(8):
        save(tmp_path / f'images/{n}.png', np.zeros((24, 16, 3)) + n)
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(16, 24))
    error = ask(tmp_path)
    assert 'save them upright' in str(error)
    assert len(inspect(tmp_path, **typed(offered(error, 'rescale_masks')))[1].pairs.images) == 8


def test_a_folder_without_copies_is_named_through_links(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for place, count in (('deep/y/set/train', 6), ('deep/y/set/val', 2)):
        for n in range(count):
            save(tmp_path / place / f'images/{place[-3:]}{n}.png', draw.integers(0, 255, (16, 16, 3)))
            save(tmp_path / place / f'masks/{place[-3:]}{n}.png', 255 * np.eye(16))
    for kind in ('images', 'masks'):
        shutil.copytree(tmp_path / 'deep/y/set/val' / kind, tmp_path / 'deep/y/raw/train' / kind)
    (tmp_path / 'deep/z').mkdir()
    (tmp_path / 'lnk').symlink_to(tmp_path / 'deep/z')
    monkeypatch.chdir(tmp_path)
    note = next(note for note in inspect('lnk/../y')[1].notes if 'trained on too' in note)
    inspect(typed(offered(note, 'data='))['data'])                      # is there


def test_evaluate_says_what_to_type_for_other_masks_in_alpha(run_of_eight, tmp_path):
    for n in range(4):
        save(tmp_path / f'other/images/{n}.png', np.zeros((32, 32, 3)) + n)
        save(tmp_path / f'other/masks/{n}.png', in_alpha().repeat(2, 0).repeat(2, 1))
    with pytest.raises(train_unet.UserError, match='type mask_values=alpha'):
        train_unet.evaluate(str(run_of_eight), data=str(tmp_path / 'other'))
    train_unet.evaluate(str(run_of_eight), data=str(tmp_path / 'other'), mask_values='alpha')
