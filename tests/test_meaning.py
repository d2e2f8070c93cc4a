"""Data: what the masks mean. Which values, numbers and colours are which class, and what is asked in doubt.

Run: python -m pytest tests/test_meaning.py
"""
import os
import re
import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest

import train_unet
from conftest import draw_set
from helpers import DISC, ask, block, coded_set, dataset, disc_set, fill, inspect, mask_of, noisy_jpeg, noisy_reds
from helpers import offered, save, typed, with_masks
from train_unet import DataError


# --- codings --------------------------------------------------------------------------


def test_a_threshold_where_more_classes_are_typed(tmp_path):
    data = inspect(with_masks(tmp_path, [255 * DISC] * 4), mask_values='>127', num_classes=3)[1]
    assert data.coding.num_classes == len(data.shares) == 3 and data.shares[1] > 0 == data.shares[2]
    assert any('no training mask has class 2' in note for note in data.notes)


def test_ids_of_many_objects_that_mask_values_does_not_name_are_not_all_listed(tmp_path):
    masks = [PIL.Image.fromarray((np.arange(4096, dtype=np.uint16) // 4 * 7).reshape(64, 64)) for _ in range(4)]
    told = str(ask(with_masks(tmp_path, masks), mask_values={0: 0, 1: 1}))
    assert 'if they are ids of objects type mask_values=nonzero' in told and len(told) < 1000


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
    ('-1 beside white', '.npy', np.int16, [0, 255, -1], [0, 1, 255], {}),
    ('ignore_index', '.png', None, [*range(12)], [*range(11), 255], {'ignore_index': 11}),
    ('255 is a class', '.png', None, [0, 1, 255], [0, 1, 2],
     {'ignore_index': None, 'mask_values': {0: 0, 1: 1, 255: 2}}),
    ('the unnamed is background', '.png', None, [0, 3, 255], [0, 0, 1], {'mask_values': {255: 1}}),
    ('an ignored value stays so', '.png', None, [0, 3, 255], [0, 1, 255], {'mask_values': {3: 1}}),
    ('threshold', '.png', None, [0, 100, 200], [0, 0, 1], {'mask_values': '>127'}),
]


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


def test_noise_of_jpeg_around_a_class_of_254_is_not_ignored(tmp_path):
    """255 is, where it is a value of its own; a seventh of the class was."""
    draw = np.random.default_rng(0)
    for n in range(4):
        mask = np.kron(draw.integers(0, 3, (8, 8)), np.ones((20, 20), int))    # not along JPEG's blocks
        save(tmp_path / f'images/{n}.png', np.zeros((160, 160, 3)) + n)
        (tmp_path / 'masks').mkdir(exist_ok=True)
        PIL.Image.fromarray(np.array([0, 127, 254], np.uint8)[mask]).save(tmp_path / f'masks/{n}.jpg', quality=75)
    config, data = inspect(tmp_path, mask_values={0: 0, 127: 1, 254: 2})
    ids = data.coding.encode(train_unet.read_mask(str(tmp_path / 'masks/3.jpg'), config))
    assert not (ids == 255).any() and (ids == mask).mean() > 0.99


def test_a_silhouette_in_the_transparency_of_a_palette_is_told(tmp_path):
    """What optimisers of PNG make of a black shape on nothing."""
    for n in range(4):
        picture = PIL.Image.fromarray(DISC.astype(np.uint8))
        picture.putpalette([0, 0, 0] * 2)
        save(tmp_path / f'images/{n}.png', np.zeros((*DISC.shape, 3)) + n)
        (tmp_path / 'masks').mkdir(exist_ok=True)
        picture.save(tmp_path / f'masks/{n}.png', transparency=0)
    assert 'type mask_values=alpha' in str(ask(tmp_path))
    assert inspect(tmp_path, mask_values='alpha')[1].values[255][0] == 4 * DISC.sum()


def test_16_bit_foreground_is_understood(tmp_path):
    """0 and 65535: the masks of TGS Salt."""
    folder, _ = coded_set(tmp_path / 'set', [0, 65535], kind='I;16')
    assert inspect(folder)[1].coding.table.items() >= {(0, 0), (65535, 1)}


def test_of_colours_without_black_the_rarest_may_be_foreground_alone(tmp_path):
    masks = [np.full((8, 8, 3), 255)] * 3
    masks = [np.where(np.arange(8)[:, None, None] < 2, [255, 0, 0], mask) for mask in masks]      # red on a white page
    assert "if only '#ff0000' is foreground" in str(ask(with_masks(tmp_path, masks)))


def test_wanted_number_of_classes_is_kept(tmp_path):
    """Classes that no mask holds still count."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    assert inspect(folder, num_classes=7)[1].coding.num_classes == 7


def test_too_few_classes_that_were_typed_are_the_first_that_is_told(tmp_path):
    """The first line offered was a table that num_classes=3 refuses; who does not count the background meets it."""
    mask = np.repeat(np.arange(4), 16)[:, None].repeat(64, 1)
    told = [line for line in ask(with_masks(tmp_path, [mask] * 3), num_classes=3).problems if 'type ' in line]
    assert 'type num_classes=4' in told[0] and inspect(tmp_path, num_classes=4)[1].coding.num_classes == 4


def test_numbers_far_apart_are_a_table_also_where_too_few_classes_were_typed(tmp_path):
    mask = np.repeat([0, 85, 170, 255], 16)[:, None].repeat(64, 1)
    told = [line for line in ask(with_masks(tmp_path, [mask] * 3), num_classes=4).problems if 'type ' in line]
    assert 'mask_values="{0: 0, 85: 1, 170: 2, 255: 3}"' in told[0]


def test_wanted_number_of_classes_explains_gaps(tmp_path):
    """59 classes of which few occur: the user said how many there are."""
    folder, _ = coded_set(tmp_path / 'set', [0, 5, 14, 55])
    _, data = inspect(folder, num_classes=59)
    assert data.coding.encode(np.array([[0, 5, 14, 55]])).tolist() == [[0, 5, 14, 55]]


@pytest.mark.parametrize('seed', range(5))
def test_codes_become_the_classes_that_a_plain_loop_gives(seed):
    draw = np.random.default_rng(seed)
    colour = train_unet.COLOUR
    some = [-3, -1, 0, 1, 7, 255, 40_000, colour - 1, colour, colour + 0x0a0a0a, 2 * colour - 1]
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


# --- what is ignored ------------------------------------------------------------------


def test_what_is_to_be_ignored_is_no_background_unasked(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 255])
    assert 'type mask_values="{0: 0, 255: 1}"' in str(ask(folder, ignore_index=0))
    assert inspect(folder)[1].meaning == {0: 0, 255: 1}


def test_what_is_ignored_is_so_beside_a_threshold_too(tmp_path):
    folder, place = coded_set(tmp_path / 'set', [0, 1, 2, 3, 255])
    _, data = inspect(folder, mask_values='nonzero')
    assert (data.coding.encode(np.array([0, 1, 3, 255])) == [0, 1, 1, 255]).all()
    folder, place = coded_set(tmp_path / 'bright', [0, 200, 255])
    _, data = inspect(folder, mask_values='>127')
    assert (data.coding.encode(np.array([0, 200, 255])) == [0, 1, 1]).all()
    _, data = inspect(folder, mask_values='>127', ignore_index=200)
    assert (data.coding.encode(np.array([0, 200, 255])) == [0, 255, 1]).all()


def test_any_number_of_an_object_is_foreground_above_0():
    """0xfefeff is no colour of what is left out, -1."""
    coding = train_unet.Coding(None, 0)
    assert coding.encode(np.array([[0, 1, 0xfefeff, 0xfefefe]])).tolist() == [[0, 1, 1, 1]]


def test_minus_one_is_ignored_with_nonzero_too(tmp_path):
    for number in range(4):
        mask = np.zeros((8, 8), np.int16)
        mask[0], mask[1] = -1, number + 300
        save(tmp_path / 'set' / 'images' / f'{number}.png', np.random.default_rng(number).integers(0, 255, (8, 8, 3)))
        (tmp_path / 'set' / 'masks').mkdir(exist_ok=True)
        np.save(tmp_path / 'set' / 'masks' / f'{number}.npy', mask)
    config, data = inspect(tmp_path / 'set', mask_values='nonzero')
    assert mask_of(data, config, '0')[:3, 0].tolist() == [255, 1, 0]
    assert data.coding.words == 'values above 0 are foreground; -1 is ignored'
    assert dataset(tmp_path / 'set', augment='none', num_epochs=1, mask_values='nonzero')[0].ignores


@pytest.mark.parametrize('channels', [1, 3])
def test_void_is_left_out_of_nonzero_also_where_it_is_a_grey_colour(tmp_path, channels):
    masks = [block(number, 4) + block(255, 24) for number in (1, 2, 3, 1)]
    masks = [np.minimum(mask, 255) for mask in masks]
    masks = [np.stack([mask] * 3, -1) if channels == 3 else mask for mask in masks]
    data = inspect(with_masks(tmp_path, masks), mask_values='nonzero')[1]
    assert data.coding.words == 'values above 0 are foreground; 255 is ignored'
    assert data.classes[255][0] == 4 * 8 * 16 and data.classes[1][0] == 4 * 16 * 16


@pytest.mark.parametrize('settings, expected', [
    ({}, '0 is background, 1 foreground; -9999 is ignored'),
    ({'mask_values': {1: 1}}, 'as mask_values says; 0 -> 0; -9999 is ignored')])
def test_numbers_below_zero_are_ignored(tmp_path, settings, expected):
    for number in range(4):
        mask = block(1, number)
        mask[:, 40:] = -9999
        save(tmp_path / f'images/{number}.png', np.zeros((32, 48, 3)))
        save(tmp_path / f'masks/{number}.npy', mask.astype(np.int16))
    data = inspect(tmp_path, **settings)[1]
    assert data.coding.words == expected and data.classes[255][0] == 4 * 32 * 8 and 255 in data.coding.table.values()


def test_ignored_pixels_alone_are_no_foreground_of_many_classes(tmp_path):
    """A set of one's own for evaluate may hold only background and void."""
    folder, place = coded_set(tmp_path / 'set', [0, 255])
    config, data = inspect(folder, num_classes=11)
    assert set(np.unique(mask_of(data, config, '1'))) == {0, 255}


def test_masks_of_ignored_values_alone_are_told_of(tmp_path):
    coded_set(tmp_path / 'set', [255, -1], '.npy')
    with pytest.raises(DataError, match="nothing but -1, 255.*type mask_values='?\"?{-1: 0, 255: 1}"):
        inspect(tmp_path / 'set')


def test_two_classes_that_leave_out_most_of_the_picture_say_so(tmp_path):
    """A stray pixel of 1 beside the foreground 255."""
    masks = [block(255, row) for row in range(4)]
    for mask in masks:
        mask[0, 0] = 1
    folder = with_masks(tmp_path, masks)
    said = inspect(folder, num_classes=2)[1].coding.words
    assert said.endswith('1 foreground; 255 is ignored; if 255 is the foreground type mask_values="{255: 1}"')
    assert inspect(folder, **typed('mask_values="{255: 1}"'))[1].shares[1] == pytest.approx(1 / 6)


# --- values that are not clear: lines to type -----------------------------------------


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


def test_class_numbers_that_begin_with_1_are_taken_if_their_count_is_typed(tmp_path):
    """Oxford pets: 1, 2, 3. The line that is printed must not lead back to itself."""
    folder, place = coded_set(tmp_path / 'set', [1, 2, 3])
    line = offered(ask(folder), 'num_classes=')
    config, data = inspect(folder, **typed(line))
    assert (mask_of(data, config, '1') == place + 1).all()


def test_a_class_of_few_images_is_no_speck(tmp_path):
    """11 covers a hundredth of one image in 40; 90, a stray line, a three hundredth of it."""
    masks = [np.kron(block(4, n % 8), np.ones((4, 4))) for n in range(40)]
    masks[0][:16, :16], masks[0][-1, -80:] = 11, 90
    asked = ask(with_masks(tmp_path, masks))
    assert 'if 90 are specks, to be ignored, type mask_values="{0: 0, 4: 1, 11: 2, 90: 255}"' in str(asked)


def test_noise_in_all_values_is_not_taken_for_class_numbers(tmp_path):
    """Background, disc and cup with the noise of JPEG between, saved as PNG: 0 to 255 without a gap."""
    stored = [0] * 2000 + [128] * 1000 + [255] * 800 + [*range(256)]
    asked = ask(with_masks(tmp_path, [np.resize(stored, (64, 64))] * 4))
    first = next(line for line in asked.problems if 'type ' in line)
    assert first.endswith('type mask_values="{0: 0, 128: 1, 255: 2}"')


def test_a_hundred_classes_are_offered_as_classes(tmp_path):
    """0 to 99 without a gap, so many that they could be objects: the user is asked."""
    folder, place = coded_set(tmp_path / 'set', [*range(100)])
    asked = ask(folder)
    line = offered(asked, 'num_classes=')
    assert line == 'num_classes=100' and str(asked).index(line) < str(asked).index('mask_values=nonzero')
    config, data = inspect(folder, **typed(line))
    assert data.coding.num_classes == 100
    assert (mask_of(data, config, '1') == place).all()


@pytest.mark.parametrize('stored', [[0, 0, 252, 253, 254, 255],
                                    [0] * 900 + [1] * 90 + [*range(80), *range(160, 251)] + [250] * 200,
                                    [0] * 900 + [255 * step // 50 for step in range(51)],
                                    [0] * 3000 + [85] + [170] * 2 + [255] * 1093],
                         ids=['just below white', 'a soft edge, and a background of 1 in places', 'a map of saliency',
                              'a rim of two greys'])
def test_values_that_lean_on_white_are_told_apart_by_brightness_first(tmp_path, stored):
    folder = with_masks(tmp_path, [np.resize(stored, (64, 64))] * 4)
    said = str(ask(folder))
    first = said.index(offered(ask(folder), 'mask_values='))
    assert said.index('mask_values=">127"') == first < said.index('mask_values=nonzero')


@pytest.mark.parametrize('images_of_3, is_told_first', [(1, True), (4, False)])
def test_255_that_is_there_alone_is_no_rim(tmp_path, images_of_3, is_told_first):
    """Cracks are 255 in every mask, 3 what they enclose in one. Where 3 is in all 255 may be the rim around it."""
    cracks = [np.resize([0] * 4000 + [3 * (n < images_of_3)] * 20 + [255] * 76, (64, 64)) for n in range(4)]
    assert (offered(ask(with_masks(tmp_path, cracks)), 'mask_values=') == 'mask_values=">127"') == is_told_first


@pytest.mark.parametrize('stored', [[0] * 900 + [*range(1, 75)] + [255] * 100, [0, 0, 230, 255]],
                         ids=['ids of objects, 255 around them', 'greys that are bright, not white'])
def test_a_bright_value_that_may_mean_something_else_is_not_told_first(tmp_path, stored):
    asked = ask(with_masks(tmp_path, [np.resize(stored, (64, 64))] * 4))
    assert offered(asked, 'mask_values=') != 'mask_values=">127"' and 'mask_values=">127"' in str(asked)


def test_evenly_spaced_values_are_classes_first(tmp_path):
    """Eyes: 128 is the disc, 255 the cup."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((10, 10, 3)))
        save(tmp_path / f'masks/{n}.png', np.repeat([0] * 7 + [128] * 2 + [255], 10).reshape(10, 10))
    assert offered(ask(tmp_path), 'mask_values=') == 'mask_values="{0: 0, 128: 1, 255: 2}"'


def test_evenly_spaced_values_may_be_a_scale(tmp_path):
    """0, 64, 128, 191, 255 (four experts): 255 may be a class or what is ignored, both lines are there."""
    for n in range(4):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        mask = np.zeros((8, 8))
        mask[0, :4] = [64, 128, 191, 255]
        save(tmp_path / f'set/masks/{n}.png', mask)
    said = str(ask(tmp_path / 'set'))
    assert '255: 4' in said and '255: 255' in said


def test_three_grey_levels_are_offered_as_classes(tmp_path):
    """Disc and cup: 0, 128, 255; 255 may be void or a class, so both lines are there."""
    folder, place = coded_set(tmp_path / 'set', [0, 128, 255])
    lines = [line.split(' type ')[1] for line in ask(folder).problems if ' type mask_values="{0' in line]
    assert lines == ['mask_values="{0: 0, 128: 1, 255: 2}"', 'mask_values="{0: 0, 128: 1, 255: 255}"']
    config, data = inspect(folder, **typed(lines[0]))
    assert (mask_of(data, config, '1') == place).all()


def test_masks_of_minus_one_and_one_get_a_line_with_a_background(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for path in sorted((folder / 'masks').iterdir()):
        np.save(path.with_suffix('.npy'), np.asarray(PIL.Image.open(path)).astype(np.int16) * 2 - 1)
        path.unlink()
    line = offered(ask(folder), 'mask_values=')
    _, data = inspect(folder, **typed(line))
    assert line == 'mask_values="{-1: 0, 1: 1}"' and data.shares.tolist() == pytest.approx([0.5, 0.5])


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


def test_the_line_that_takes_all_but_0_takes_255_too(tmp_path):
    for number in range(6):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{number}.png', np.array([0, 0, 127, 255])[np.arange(64).reshape(8, 8) % 4])
    assert 'type mask_values=nonzero ignore_index=None' in str(ask(tmp_path))
    _, data = inspect(tmp_path, **typed('mask_values=nonzero ignore_index=None'))
    assert data.shares.tolist() == [0.5, 0.5] and train_unet.IGNORE not in data.classes


def test_bright_is_not_offered_where_nothing_is_dark(tmp_path):
    for n in range(4):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        save(tmp_path / f'set/masks/{n}.png', np.where(np.arange(64).reshape(8, 8) < 20, 128, 255))
    said = str(ask(tmp_path / 'set'))
    assert "type mask_values" in said and '>127' not in said


def test_a_stray_pixel_of_one_does_not_make_the_foreground_ignored(tmp_path):
    def write(number):
        mask = 255 * DISC
        mask[0, 0] = 1
        save(tmp_path / f'set/masks/{number}.png', mask)

    with pytest.raises(DataError, match='if only 255 is foreground type mask_values'):
        inspect(disc_set(tmp_path / 'set', write))


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


# --- mask_values that were typed ------------------------------------------------------


def test_what_mask_values_leaves_out_is_told(tmp_path):
    """REFUGE: cup 0, disc 128, all else 255."""
    masks = [255 - 127 * (block(1, row) > 0) for row in range(4)]
    for mask in masks:
        mask[10:14, 10:14] = 0
    words = inspect(with_masks(tmp_path, masks), mask_values={0: 1})[1].coding.words
    assert words == 'as mask_values says; 128 -> 0; 255 is ignored'


def test_thirty_unnamed_values_are_all_in_the_line_to_type(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, *range(50, 82)])
    with pytest.raises(DataError) as caught:
        inspect(folder, mask_values={0: 0, 50: 1})
    assert '81: 255' in str(caught.value)


# --- ids of objects -------------------------------------------------------------------


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


def test_ids_of_objects_in_three_masks_are_asked_about(tmp_path):
    for number, count in enumerate([5, 11, 16]):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        save(tmp_path / f'masks/{number}.png', np.arange(16 * 16).reshape(16, 16) % (count + 1))
    assert typed(offered(ask(tmp_path), 'mask_values=')) == {'mask_values': 'nonzero'}


def test_ids_of_objects_are_offered_as_foreground_first(tmp_path):
    for number, count in enumerate([9, 6, 4, 3, 2, 2]):                # each mask begins anew with 1
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        save(tmp_path / f'masks/{number}.png', np.arange(16 * 16).reshape(16, 16) % (count + 1))
    save(tmp_path / 'images/9.png', np.zeros((16, 16, 3)) + 50)
    save(tmp_path / 'masks/9.png', np.where(np.arange(256).reshape(16, 16) % 13 == 12, 14, 0))
    assert typed(offered(ask(tmp_path), 'mask_values=')) == {'mask_values': 'nonzero'}


@pytest.mark.parametrize('channels', [1, 3])
def test_ids_of_objects_are_asked_about_also_where_they_are_grey_colours(tmp_path, channels):
    masks = [np.zeros((32, 48)) for _ in range(6)]
    for count, mask in enumerate(masks, 2):
        for number in range(1, count + 1):
            mask[2:10, 5 * number:5 * number + 3] = number
    masks = [np.stack([mask] * 3, -1) if channels == 3 else mask for mask in masks]
    assert typed(offered(ask(with_masks(tmp_path, masks)), 'mask_values=')) == {'mask_values': 'nonzero'}


@pytest.mark.parametrize('kind', ['P', None], ids=['palette', 'grey'])
def test_ids_of_objects_with_ignored_borders_are_asked_about(tmp_path, kind):
    """VOC's SegmentationObject: 255 lies around the objects, and stays ignored."""
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        rows = np.arange(16) % (number % 6 + 2)
        save(tmp_path / f'masks/{number}.png', np.where(np.eye(16, dtype=bool), 255, rows[:, None]), kind)
    error = ask(tmp_path)
    assert 'ignore_index' not in str(error)
    _, data = inspect(tmp_path, **typed(offered(error, 'mask_values=nonzero')))
    assert data.coding.num_classes == 2 and data.meaning[255] == 255 and data.meaning[3] == 1


@pytest.mark.parametrize('masks, suspected', [
    ([[0, 1], [0, 1, 2], [0, 1, 2, 3]], True), ([[0, 1, 2, 3]] * 3, False), ([[0, 1], [0, 2], [0, 1, 2, 3]], False)])
def test_ids_of_at_most_three_objects_are_suspected(tmp_path, masks, suspected):
    for number in range(9):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        save(tmp_path / f'masks/{number}.png', np.resize(masks[number % 3], 16)[:, None].repeat(16, 1))
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 4 and suspected == any('mask_values=nonzero' in note for note in data.notes)


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


@pytest.mark.parametrize('step', [0x010000, 0x1f3b05, 12], ids=['in the red channel', 'colours', 'every twelfth grey'])
def test_ids_in_other_codes_than_numbers_are_offered_as_objects_first(tmp_path, step):
    """BBBC039: the n-th cell of an image has the colour (n, 0, 0)."""
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        rows = np.arange(16) % (number % 7 + 2) * step
        save(tmp_path / f'masks/{number}.png', rows[:, None].repeat(16, 1), 'RGB' if step > 255 else None)
    line = offered(ask(tmp_path), 'mask_values=')
    assert line == 'mask_values=nonzero'
    assert inspect(tmp_path, **typed(line))[1].coding.num_classes == 2


@pytest.mark.parametrize('kind, suspected', [('I;16', True), (None, False)], ids=['16 bits', '8 bits'])
def test_ids_of_tracked_cells_are_suspected(tmp_path, kind, suspected):
    """The Cell Tracking Challenge: a cell keeps its number through the film, so that all images hold about the same."""
    for number in range(9):
        save(tmp_path / f'images/{number}.png', np.zeros((16, 16, 3)) + 50)
        rows = np.arange(16) % (7 - number % 2)
        save(tmp_path / f'masks/{number}.png', rows[:, None].repeat(16, 1), kind)
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 7 and suspected == any('mask_values=nonzero' in note for note in data.notes)


def test_ids_that_could_be_classes_are_suspected(tmp_path):
    """0 to n in each mask, with few different n: taken as classes, but said."""
    for n in range(12):
        save(tmp_path / f'set/images/{n}.png', np.zeros((16, 16, 3)))
        save(tmp_path / f'set/masks/{n}.png', np.resize([*range([4, 6, 8][n % 3])], 16)[:, None].repeat(16, 1))
    _, data = inspect(tmp_path / 'set')
    assert data.coding.num_classes == 8 and [note for note in data.notes if 'mask_values=nonzero' in note]


def test_six_classes_of_which_higher_numbers_are_rarer_are_no_ids(tmp_path):
    """Cars: ids would begin with 1 in each mask, and leave none out."""
    for number in range(12):
        save(tmp_path / f'images/{number}.png', np.zeros((8, 8, 3)))
        parts = [1, 2, 3] if number < 6 else [1, 2, 4, 5] if number < 10 else [1, 2, 4, 6]
        rows = np.repeat(parts, 8).reshape(-1, 8)
        save(tmp_path / f'masks/{number}.png', np.pad(rows, ((0, 8 - len(parts)), (0, 0))))
    _, data = inspect(tmp_path)
    assert data.coding.num_classes == 7 and not any('ids of objects' in note for note in data.notes)


@pytest.mark.parametrize('rows, asked', [(1, True), (8, False)], ids=['LoveDA', 'a small class'])
def test_a_rare_zero_may_mark_what_has_no_label(tmp_path, rows, asked):
    """LoveDA: classes 1 to 7, and 0 where there is no data. Background, which 0 mostly is, is not rare."""
    for number in range(10):
        mask = 1 + np.arange(70)[:, None].repeat(64, 1) // 10
        mask[:rows, :32] = 0
        save(tmp_path / f'images/{number}.png', np.zeros((70, 64, 3)))
        save(tmp_path / f'masks/{number}.png', mask)
    _, data = inspect(tmp_path)
    lines = [note for note in data.notes if 'has no label' in note]
    assert data.coding.num_classes == 8 and bool(lines) == asked
    if asked:
        _, data = inspect(tmp_path, **typed(lines[0]))
        assert data.coding.num_classes == 7 and data.meaning == {0: 255} | {code: code - 1 for code in range(1, 8)}


@pytest.mark.parametrize('slips, is_told', [({2: 2}, True), ({2: 1, 3: 1}, True), ({2: 40}, False)])
def test_classes_of_a_few_pixels_may_be_slips(tmp_path, slips, is_told):
    """Two nuclei that overlap, 1 + 1, or values between those of others from resizing: with the line they are ignored.
    A class of more pixels is no slip."""
    masks = []
    for n in range(6):
        mask = np.zeros((300, 300), np.uint8)
        mask[20 * n:20 * n + 30, 50:90] = 1
        for code, count in slips.items() if n < 2 else ():
            mask[150, code:code + 5 * count:5] = code
        masks.append(mask)
    folder = with_masks(tmp_path / 'set', masks)
    config, data = inspect(folder, num_classes='auto')
    lines = [note for note in data.notes if 'if they are slips' in note]
    assert bool(lines) == is_told and data.coding.num_classes == 2 + len(slips)
    if is_told:
        _, again = inspect(folder, **typed(offered(lines[0], 'mask_values')))
        assert again.coding.num_classes == 2 and again.classes[255][0] == 2 * sum(slips.values())
    _, meant = inspect(folder, mask_values={n: n for n in range(2 + len(slips))})
    assert not any('if they are slips' in note for note in meant.notes)


def test_a_class_of_one_small_object_in_a_large_set_is_no_slip(tmp_path):
    masks = np.zeros((2, 3000, 3000), np.uint8)
    masks[:, :50], masks[0, 100:110, 100:110] = 1, 2
    assert not any('slips' in note for note in inspect(with_masks(tmp_path / 'set', masks))[1].notes)


# --- noise of JPEG and soft edges -----------------------------------------------------


@pytest.mark.parametrize('values, level', [
    ({0: 9000} | dict.fromkeys(range(1, 41), 10), 5),                  # all is dark: not above the 27 where light is
    ({0: 1000, 60: 60, 200: 1000}, 5), ({0: 1000, 60: 50, 200: 1000}, 0),          # more, less than 1 in 20
    ({0: 1000, 3: 90, 60: 500}, 8), ({0: 9}, 0)])
def test_the_emptiest_level_lies_between_the_noise_of_black_and_what_is_lit(values, level):
    assert train_unet.emptiest_level(values) == level


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


@pytest.mark.parametrize('wish', [{255: 1}, {0: 0, 255: 1}])
def test_named_white_takes_the_noise_around_it(tmp_path, wish):
    folder = disc_set(tmp_path / 'set', lambda n: noisy_jpeg(tmp_path / f'set/masks/{n}.jpg', 255 * DISC))
    config, data = inspect(folder, mask_values=wish)
    assert (mask_of(data, config, '0') == DISC).mean() > 0.995


def test_a_colour_that_only_its_noise_shows_is_found(tmp_path):
    """'#ff0000' typed, and no pixel is exactly that."""
    assert inspect(noisy_reds(tmp_path / 'set'), mask_values={'#ff0000': 1})[1].shares[1] == 0.5


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


def soft_levels(levels, suffix):
    """Masks of these greys: a large block of the last, a small one of each other but the first, and soft edges, but
    not in what shall be JPEG."""
    masks = np.full((4, 128, 128), levels[0], np.uint8)
    for n in range(4):
        for number, level in enumerate(levels[1:]):
            side = 40 if level == levels[-1] else 18
            masks[n, 2 + 20 * number:2 + 20 * number + side, 10 + 15 * n:10 + 15 * n + side] = level
    return masks if suffix == '.jpg' else [cv2.resize(cv2.resize(mask, (100, 100)), (128, 128)) for mask in masks]


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
@pytest.mark.parametrize('levels', [(0, 50, 255), (0, 128, 255), (0, 200, 255), (0, 85, 170, 255)])
def test_greys_that_fill_areas_are_classes_not_noise_between_black_and_white(tmp_path, levels, suffix):
    folder = with_masks(tmp_path, soft_levels(levels, suffix), suffix)
    line = offered(ask(folder), 'mask_values=')
    config, data = inspect(folder, **typed(line))
    exact = np.searchsorted(levels, soft_levels(levels, '.jpg'))
    assert all((mask_of(data, config, str(n)) == exact[n]).mean() > 0.97 for n in range(4))
    for wish in ({255: 1}, {0: 0, 255: 1}):
        assert 'noise between' not in str(inspect(folder, mask_values=wish)[1].coding.words)


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_classes_in_grey_stored_as_colours_get_the_same_line(tmp_path, suffix):
    masks = [np.dstack([mask] * 3) for mask in soft_levels((0, 128, 255), suffix)]
    assert typed(offered(ask(with_masks(tmp_path, masks, suffix)), 'mask_values='))['mask_values'] == {
        0: 0, 128: 1, 255: 2}


def test_areas_are_what_all_neighbours_are_like():
    codes = np.zeros((5, 7), np.int32)
    codes[:, 3:] = 6                                                   # as noise may differ
    codes[:, 6] = 13
    for stored in (codes, train_unet.COLOUR + (codes << 16), np.asfortranarray(codes)):
        assert (train_unet.in_areas(stored) == (np.arange(7) < 5)).all()
    codes = np.random.default_rng(0).integers(0, 2, (40, 30), np.int32).repeat(3, 0).repeat(3, 1)
    for most in (1, 90, 91, 1000):                                     # in bands of 1, 1, 1 and 11 rows
        assert np.array_equal(train_unet.in_areas(codes, 0, most), train_unet.in_areas(codes, 0))


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
@pytest.mark.parametrize('width', [6, 40])
@pytest.mark.parametrize('soften', [lambda mask: cv2.GaussianBlur(mask, (0, 0), 1.2),
                                    lambda mask: cv2.resize(cv2.resize(mask, (100, 100)), (128, 128))])
def test_no_soft_edge_is_a_class(tmp_path, soften, width, suffix):
    masks = np.zeros((4, 128, 128), np.uint8)
    for n in range(4):
        cv2.line(masks[n], (20, 20 + 5 * n), (100, 90), 255, width)
    assert inspect(with_masks(tmp_path, map(soften, masks), suffix))[1].coding.threshold == 127


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


@pytest.mark.parametrize('names, soften', [
    (['#0000ff', '#00ff00', '#ff0000'], lambda mask: cv2.GaussianBlur(mask, (0, 0), 0.7)),       # few colours
    (['#0000ff', '#00ff00', '#ff0000', '#ffff00'], lambda mask: cv2.GaussianBlur(mask, (0, 0), 1.2)),
    (['#0000ff', '#00ff00', '#ff0000', '#ffff00'], None)])
def test_a_rare_colour_is_a_class_if_it_fills_areas_no_edge_is_one(tmp_path, names, soften):
    """Of 1 in 250 pixels, of 1 in 110; None: as JPEG."""
    colours = np.array([[0, 0, 0], *([int(name[at:at + 2], 16) for at in (1, 3, 5)] for name in names)], np.uint8)
    exact = np.zeros((4, 256, 256), int)
    for n in range(4):
        for number, (top, height, width) in enumerate([(180, 14, 18), (90, 60, 120), (0, 80, 256), (212, 24, 24)], 1):
            exact[n, top:top + height, 8 * n:8 * n + width] = number if number <= len(names) else 0
    masks = [colours[mask] if soften is None else soften(colours[mask]) for mask in exact]
    with_masks(tmp_path, masks, '.jpg' if soften is None else '.png')
    config, data = inspect(tmp_path, **typed(offered(ask(tmp_path), 'mask_values=')))
    assert data.coding.num_classes == len(colours)
    assert all((mask_of(data, config, str(n)) == exact[n]).mean() > 0.97 for n in range(4))


def test_a_class_that_was_forgotten_beside_soft_edges_is_asked_for(tmp_path):
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8)
    exact = np.zeros((3, 64, 64), int)
    exact[:, 8:30, 8:30], exact[:, 36:60, 20:40] = 1, 2
    with_masks(tmp_path, [cv2.GaussianBlur(colours[mask], (0, 0), 0.7) for mask in exact])
    wish = {'#000000': 0, '#ff0000': 1, '#0000ff': 2}
    assert inspect(tmp_path, mask_values=wish)[1].coding.num_classes == 3
    wish.pop('#0000ff')
    assert "mask_values does not name '#0000ff'" in str(ask(tmp_path, mask_values=wish))


@pytest.mark.parametrize('wish, is_told', [('>127', True), ('<128', False), ('nonzero', False)])
def test_how_much_lies_between_is_told_of_a_threshold_that_was_typed(tmp_path, wish, is_told):
    with_masks(tmp_path, [np.arange(16, dtype=np.uint8).reshape(4, 4) * 17] * 3)
    words = inspect(tmp_path, mask_values=wish)[1].coding.words
    assert ('; 87.50% of the pixels lie between 0 and 255' in words) == is_told


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


@pytest.mark.parametrize('mode, darkest, brightest, quality', [
    ('RGB', 60, 200, 75), ('RGB', 20, 90, 75), ('L', 60, 200, 75), ('RGB', 250, 251, 75), ('RGB', 250, 251, 100)],
    ids=['photographs', 'dark ones', 'grey ones', 'yellow', 'yellow with few colours'])
def test_jpeg_masks_are_offered_a_level_above_their_noise_not_nonzero(tmp_path, mode, darkest, brightest, quality):
    """PlantVillage: segmented/ holds the leaves, cut out on black. JPEG holds no ids, and its noise is not 0."""
    disc = (np.mgrid[:64, :64] ** 2).sum(0) < 1000
    for n in range(4):
        colours = np.random.default_rng(n).integers(darkest, brightest, (5, 5, 3)).astype(np.uint8)
        colours[..., 2] //= 2 if darkest == 250 else 1                 # white would be ready
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)) + n)
        (tmp_path / 'masks').mkdir(exist_ok=True)
        cut = PIL.Image.fromarray(cv2.resize(colours, (64, 64)) * disc[..., None].astype(np.uint8))
        cut.convert(mode).save(tmp_path / f'masks/{n}.jpg', quality=quality, subsampling=0)
    error = ask(tmp_path)
    line = offered(error, 'mask_values=">')
    assert 'nonzero' not in str(error) and (line == 'mask_values=">127"') == (darkest == 250)
    config, data = inspect(tmp_path, **typed(line))
    assert all((mask_of(data, config, str(n)) == disc).mean() > 0.98 for n in range(4))


def test_colour_pictures_cut_out_on_black_are_called_so(tmp_path):
    """Number plates in colour, as PNG, were ids of objects alone."""
    colours = np.random.default_rng(0).integers(60, 200, (4, 24, 24, 3))
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((24, 24, 3)) + n)
        save(tmp_path / f'masks/{n}.png', colours[n] * (np.mgrid[:24, :24].sum(0) < 20)[..., None])
    assert 'ids of objects, or pictures cut out on black, so that all but 0 (black) is foreground' in str(ask(tmp_path))


@pytest.mark.parametrize('colours', [True, False])
def test_few_colours_and_grey_ids_are_no_cut_outs(tmp_path, colours):
    draw = np.random.default_rng(0)
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((24, 24, 3)) + n)
        area = np.mgrid[:24, :24].sum(0) < 20
        parts = np.array([[0, 0, 0], [200, 0, 0], [0, 200, 0]])[draw.integers(1, 3, (24, 24))] if colours \
            else draw.integers(1, 200, (24, 24))
        save(tmp_path / f'masks/{n}.png', parts * (area[..., None] if colours else area))
    assert 'cut out on black' not in str(ask(tmp_path))


def test_pictures_cut_out_on_white_are_offered_all_but_white(tmp_path):
    """Skin of photographs on a white page: nonzero would be all of it, and >127 the page."""
    disc = (np.mgrid[:64, :64] ** 2).sum(0) < 1000
    for n in range(4):
        colours = np.random.default_rng(n).integers(60, 254, (64, 64, 3)).astype(np.uint8)
        colours[:9, :, 0] = 255                                        # overexposed
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)) + n)
        save(tmp_path / f'masks/{n}.png', np.where(disc[..., None], colours, 255))
    error = ask(tmp_path)
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values="<')))
    assert 'nonzero' not in str(error)
    assert all(((mask_of(data, config, str(n)) > 0) == disc).all() for n in range(4))


@pytest.mark.parametrize('suffix, colours', [('jpg', 200), ('png', 3)])
def test_all_but_white_is_not_offered_where_noise_is_near_white_or_the_colours_are_few(tmp_path, suffix, colours):
    disc = (np.mgrid[:64, :64] ** 2).sum(0) < 1000
    for n in range(4):
        drawn = np.random.default_rng(n).integers(0, colours, (64, 64, 1)) * (180 // colours) + np.array([20, 40, 60])
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)) + n)
        save(tmp_path / f'masks/{n}.{suffix}', np.where(disc[..., None], drawn, 255))
    error = str(ask(tmp_path))
    assert '<255' not in error and 'mask_values=' in error


def test_ids_without_a_0_are_not_offered_nonzero(tmp_path):
    """Of Voronoi cells, or on a background of 1: it would make foreground of everything."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)) + n)
        save(tmp_path / f'masks/{n}.png', 1 + np.arange(64 * 64).reshape(64, 64) // 64 + 48 * n)
    assert 'nonzero' not in str(ask(tmp_path))


def test_ids_on_a_ground_of_1_are_offered_all_above_it(tmp_path):
    cells = np.arange(64 * 64).reshape(64, 64) // 64
    for n in range(6):
        save(tmp_path / f'images/{n}.png', np.zeros((64, 64, 3)) + n)
        save(tmp_path / f'masks/{n}.png', np.where(cells < 40, 1, cells + 64 * n), 'I;16')
    error = ask(tmp_path)
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values=">1"')))
    assert 'nonzero' not in str(error) and all(((mask_of(data, config, str(n)) > 0) == (cells >= 40)).all()
                                               for n in range(6))


def test_a_dark_colour_beside_black_is_a_class(tmp_path):
    """A class drawn in #232323, with soft edges: as near to black as noise may be, but far too much of it."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        mask = np.zeros((256, 256, 3), np.uint8)
        cv2.circle(mask, (80 + n, 80), 50, (0x23, 0x23, 0x23), -1)
        cv2.circle(mask, (170, 180 + n), 50, (60, 20, 220), -1)
        cv2.imwrite(str(path), cv2.GaussianBlur(mask, (9, 9), 0))
        save(folder / f'images/{path.name}', np.zeros((256, 256, 3)))
    assert [*typed(offered(ask(folder), "mask_values=\"{'#"))['mask_values']] == ['#000000', '#232323', '#dc143c']


def test_black_and_white_that_is_all_but_grey_is_ready(tmp_path):
    """Masks in RGB with soft edges, of which one grey is #626263 here and there: no edge is a class."""
    folder, exact = draw_set(tmp_path / 'set', count=4, size=96), {}
    for path in sorted((folder / 'masks').iterdir()):
        soft = cv2.GaussianBlur(np.uint8(255) * (np.array(PIL.Image.open(path)) > 0), (7, 7), 0)
        exact[path.stem] = soft > 127
        PIL.Image.fromarray(np.stack([soft, soft, soft + (soft % 9 == 8)], 2)).save(path)
    config, data = inspect(folder)
    assert data.coding.threshold == 127 and 'soft edges' in data.coding.words
    assert all(np.array_equal(mask_of(data, config, stem), mask) for stem, mask in exact.items())


def test_what_is_transparent_is_background(tmp_path):
    """A plot saved as RGBA: around it white that cannot be seen, in it a white object on black."""
    for n in range(4):
        mask = np.zeros((40, 40, 4))
        mask[..., 3], mask[10:20, 10:20 + n] = 255, 255
        mask[:4], mask[14, 14, 3] = (255, 255, 255, 0), 100            # what can be seen through is seen
        save(tmp_path / f'images/{n}.png', np.zeros((40, 40, 3)) + n)
        save(tmp_path / f'masks/{n}.png', mask)
    config, data = inspect(tmp_path)
    mask = mask_of(data, config, '2')
    assert mask[10:20, 10:22].all() and mask.sum() == 120


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


@pytest.mark.parametrize('middle, first', [(2, 'mask_values=">127"'), (30, 'mask_values="{0: 0')])
def test_votes_at_the_edges_are_no_classes(tmp_path, middle, first):
    """CUB-200-2011: five people drew each bird, so that fifths of 255 surround it."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((256, 256, 3)) + n)
        votes = np.zeros((256, 256))
        for level in range(5):
            votes[20 + middle * level // 2:120 - 2 * level, 20 + n:120] = 51 * (level + 1)
        save(tmp_path / f'masks/{n}.png', votes)
    assert offered(ask(tmp_path), 'mask_values=').startswith(first)


def test_three_levels_with_noise_are_not_taken_for_two(tmp_path):
    """Optic disc and cup as JPEG: 0, 128 and 255."""
    folder = draw_set(tmp_path / 'set', count=4, size=64)
    for path in sorted((folder / 'masks').iterdir()):
        mask = np.zeros((64, 64), np.uint8)
        mask[10:26, 10:26], mask[12:16, 12:16] = 128, 255
        PIL.Image.fromarray(mask).save(path.with_suffix('.jpg'), quality=70)
        path.unlink()
    assert 'mask_values=">127"' in str(ask(folder))


def test_class_numbers_in_jpeg_are_not_believed(tmp_path):
    folder = disc_set(tmp_path / 'set', lambda n: noisy_jpeg(tmp_path / f'set/masks/{n}.jpg', 20 * DISC))
    with pytest.raises(DataError, match='the masks are JPEG, whose noise makes values of its own'):
        inspect(folder)


@pytest.mark.parametrize('colours, table', [
    (['#ffffff', '#ff0000'], {'#ffffff': 0, '#ff0000': 1}),
    (['#ffffff', '#0000ff', '#00a000'], {'#ffffff': 0, '#0000ff': 1, '#00a000': 2}),
    (['#000000', '#ffffff', '#ff0000'], {'#000000': 0, '#ff0000': 1, '#ffffff': 2})])
def test_what_is_painted_on_white_is_no_background(tmp_path, colours, table):
    levels = np.array([[int(colour[at:at + 2], 16) for at in (1, 3, 5)] for colour in colours], np.uint8)
    for n in range(4):
        numbers = np.zeros((12, 12), int)
        for number in range(1, len(colours)):
            numbers[3 * number:3 * number + 2, n:n + 5] = number
        save(tmp_path / f'images/{n}.png', np.zeros((12, 12, 3)))
        save(tmp_path / f'masks/{n}.png', levels[numbers])
    assert typed(offered(ask(tmp_path), 'mask_values='))['mask_values'] == table


def test_dark_numbers_in_jpeg_have_a_line_too(tmp_path):
    """0 to 3: bright is nothing there."""
    folder = disc_set(tmp_path / 'set', lambda n: noisy_jpeg(tmp_path / f'set/masks/{n}.jpg', (1 + n % 3) * DISC))
    assert inspect(folder, **typed(offered(ask(folder), 'mask_values=')))[1].coding.num_classes == 2


def test_jpeg_masks_are_offered_no_numbers_of_their_noise(tmp_path):
    text = str(ask(with_masks(tmp_path, [block(200, row) for row in range(4)], '.jpg')))
    assert 'mask_values="{0: 0, 200: 1}"' in text
    assert 'num_classes=' not in text and text.count('mask_values="{') == 1


def test_ids_of_objects_are_not_taken_for_noise(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    for n, path in enumerate(sorted((folder / 'masks').iterdir())):
        ids = np.kron(np.arange(100).reshape(10, 10), np.ones((6, 6)))
        save(path, ids)
        save(folder / f'images/{path.name}', np.zeros((60, 60, 3)))
    assert 'noise around' not in str(ask(folder))
    assert 'does not name' in str(ask(folder, mask_values={0: 0, 1: 1}))


def test_numbers_beside_colours_of_the_same_classes_are_offered_as_those(tmp_path):
    """As when a network that was trained on colours is scored on masks of class numbers."""
    coded_set(tmp_path, [0, 1, 2])
    colours = {'#000000': 0, '#ff0000': 1, '#00ff00': 2}
    with pytest.raises(DataError, match='for instance as classes: mask_values='):
        inspect(tmp_path, mask_values=colours)
    assert inspect(tmp_path, mask_values=colours | {1: 1, 2: 2})[1].coding.num_classes == 3
    with pytest.raises(DataError, match='for instance as ignored: mask_values='):
        inspect(tmp_path, mask_values={0: 0, 1: 1})


def test_cut_outs_on_black_are_offered_no_table_of_a_few_of_their_colours(tmp_path):
    """One colour in a photograph, of 0.4 % of all pixels, is no class."""
    draw = np.random.default_rng(0)
    for n in range(6):
        picture = np.zeros((64, 64), int)
        picture[10:40, 10:40] = draw.integers(0, 2**24, (30, 30))
        picture[10:14, 10:14] = 0xe3e2e0
        save(tmp_path / f'images/{n}.png', np.full((64, 64, 3), n))
        save(tmp_path / f'masks/{n}.png', picture, 'RGB')
    error = str(ask(tmp_path))
    assert '#e3e2e0' in error and 'are the classes' not in error and 'mask_values=nonzero' in error


def test_beside_numbers_that_a_threshold_parts_255_stays_ignored(tmp_path):
    folder, place = coded_set(tmp_path, [0, 2, 7, 255])
    for wish, meant in (('>3', [0, 0, 1, 255]), ('<3', [1, 1, 0, 255]), ('>127', [0, 0, 0, 1])):
        config, data = inspect(folder, mask_values=wish)
        assert np.array_equal(mask_of(data, config, '0'), np.array(meant)[place]), wish


def test_numbers_of_one_palette_make_no_numbers_of_grey_codes(tmp_path):
    """0, 20, 38 in all other masks became classes up to 38."""
    greys = [np.array([0, 20, 38], np.uint8)[np.mgrid[:16, :16][0] // 6] for _ in range(6)]
    folder = with_masks(tmp_path, greys)
    save(folder / 'images/9.png', np.full((16, 16, 3), 9))
    save(folder / 'masks/9.png', np.mgrid[:16, :16][0] // 6, 'P')
    assert 'num_classes=39 or more' in str(ask(folder))


def test_a_mask_that_is_all_transparent_is_empty(tmp_path):
    """It was sent to mask_values=alpha, and with it all colours of the others became one class."""
    for n in range(6):
        pixels = np.zeros((16, 16, 4), np.uint8)
        if n != 2:
            pixels[2:8], pixels[8:14] = (255, 0, 0, 255), (0, 0, 255, 255)
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        save(tmp_path / f'masks/{n}.png', pixels)
    config, data = inspect(tmp_path, **typed(offered(ask(tmp_path), 'mask_values="{')))
    assert data.coding.num_classes == 3 and not mask_of(data, config, '2').any()
    save(tmp_path / 'masks/2.png', np.full((16, 16, 4), (255, 255, 255, 0), np.uint8))     # invisible white
    config, data = inspect(tmp_path, mask_values=config['mask_values'])
    assert not mask_of(data, config, '2').any()


def test_colours_that_each_image_has_of_its_own_are_ids(tmp_path):
    """The larger ones were offered as classes, and the smaller as noise around these."""
    draw = np.random.default_rng(0)
    for n in range(19):
        mask = np.zeros((64, 64), int)
        for k in range(15):
            top, left = 16 * (k // 4), 16 * (k % 4)
            side = 14 if k < 4 else 5
            mask[top:top + side, left:left + side] = draw.integers(1, 2**24)
        save(tmp_path / f'images/{n}.png', np.full((64, 64, 3), n))
        save(tmp_path / f'masks/{n}.png', mask, 'RGB')
    assert 'type mask_values=nonzero' in ask(tmp_path).problems[1]


def test_two_tops_of_one_noisy_colour_are_one_class():
    noise = {0xf00000 + 0x010000 * k + 0x000100 * n: 10 for k in range(10) for n in range(10)}
    values = noise | {0xff0000: 5000, 0xff0200: 5000, 0x0000ff: 4000}
    values = {train_unet.COLOUR + code: pixels for code, pixels in values.items()}
    tops = train_unet.peaks(values, [*values], 48)
    assert [code - train_unet.COLOUR for code in tops] == [0xff0000, 0x0000ff]


def test_empty_masks_do_not_make_ids_of_classes(tmp_path):
    """Nine masks hold 0 to n, as ids of objects do, five do not; five are empty."""
    held = [[]] * 5 + [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]] * 2 + [[1], [2], [3], [1, 3], [2, 4], [4]]
    masks = [np.array([0, *codes])[np.mgrid[:20, :20][0] * (len(codes) + 1) // 20] for codes in held]
    assert inspect(with_masks(tmp_path, masks))[1].coding.num_classes == 5


@pytest.mark.parametrize('counts', [[0, 2, 3, 3, 4], [0, 0, 0, 0, 1, 2, 4, 4, 2, 1]])
def test_numbers_of_objects_with_empty_masks_among_them_are_asked_about(tmp_path, counts):
    masks = [np.mgrid[:20, :20][0] * (count + 1) // 20 for count in counts]
    assert 'type mask_values=nonzero' in ask(with_masks(tmp_path, masks)).problems[1]


def test_colours_some_of_which_were_saved_as_jpeg_are_classes_with_noise_not_ids(tmp_path):
    colours = np.array([[0, 0, 0], [39, 42, 80], [104, 219, 91], [165, 25, 240], [241, 99, 53]], np.uint8)
    for n in range(8):
        mask = colours[np.add(*np.mgrid[:60, :60] // 15) % 5 * (np.mgrid[:60, :60][1] > 4 + 4 * n)]
        save(tmp_path / f'images/{n}.png', np.full((60, 60, 3), n))
        (tmp_path / 'masks').mkdir(exist_ok=True)
        if n % 2:
            PIL.Image.fromarray(mask).save(tmp_path / f'masks/{n}.jpg', quality=75)
        else:
            PIL.Image.fromarray(mask).save(tmp_path / f'masks/{n}.png')
    lines = [line for line in ask(tmp_path).problems if ' type ' in line]
    assert lines[0].startswith('if these colours are the classes and others are noise')


def test_a_threshold_above_all_numbers_leaves_255_the_foreground(tmp_path):
    """No other value is above it: all masks would be empty."""
    folder, place = coded_set(tmp_path, [0, 2, 255])
    for wish, meant in (('>2', [0, 0, 1]), ('>1', [0, 1, 255]), ('<2', [1, 0, 255]), ('<3', [1, 1, 0])):
        config, data = inspect(folder, mask_values=wish)
        assert np.array_equal(mask_of(data, config, '0'), np.array(meant)[place]), wish


def test_beside_black_alone_255_is_white_whatever_the_threshold(tmp_path):
    folder, place = coded_set(tmp_path, [0, 255])
    for wish in ('nonzero', '>0', '>5', '>127'):
        config, data = inspect(folder, mask_values=wish)
        assert np.array_equal(mask_of(data, config, '0'), place), wish


def test_where_all_that_is_seen_lies_in_alpha_the_empty_masks_alone_are_not_offered(tmp_path):
    for n in range(6):
        pixels = np.zeros((16, 16, 4), np.uint8)
        pixels[2:8, 2:8, 3] = 255 * (n != 2)
        save(tmp_path / f'images/{n}.png', np.full((16, 16, 3), n))
        save(tmp_path / f'masks/{n}.png', pixels)
    error = str(ask(tmp_path))
    assert 'type mask_values=alpha' in error and 'skip_broken' not in error
    assert inspect(tmp_path, mask_values='alpha')[1].classes[1][1] == 5


def test_numbers_that_are_typed_beside_colours_mean_their_greys(tmp_path):
    """0 was to be added as '#000000', ignored."""
    folder, place = coded_set(tmp_path, [0, 0xff0000, 0xffffff], kind='RGB')
    for wish in ({0: 0, '#ff0000': 1, 255: 2}, {'#ff0000': 1, 255: 2}):
        config, data = inspect(folder, mask_values=wish)
        assert (mask_of(data, config, '1') == place).all()


@pytest.mark.parametrize('kind', ['RGB', None])
def test_masks_without_what_is_named_may_be_all_background(tmp_path, kind):
    """Parts without a defect, to be scored: 255, none of which occurs."""
    folder, _ = coded_set(tmp_path, [0], kind=kind)
    for wish in ({255: 1}, {'#ff0000': 1}):
        assert {*inspect(folder, mask_values=wish)[1].meaning.values()} == {0}


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
@pytest.mark.parametrize('wish', [{0: 0, 1: 1, 2: 2}, {0: 0, 255: 1}, {1: 1, 2: 2}, {1: 1}])
def test_numbers_of_classes_are_no_greys_of_colour_masks(tmp_path, wish, suffix):
    masks = np.zeros((4, 128, 128, 3), np.uint8)
    masks[:, 5:35, 10:40], masks[:, 70:100, 30:60] = (255, 0, 0), (0, 255, 0)
    if suffix == '.png':
        masks = [cv2.resize(cv2.resize(mask, (100, 100)), (128, 128)) for mask in masks]
    assert 'none of which occurs' in str(ask(with_masks(tmp_path, masks, suffix), mask_values=wish))


def test_white_that_is_typed_as_a_number_is_so_in_grey_and_in_colour_masks(tmp_path):
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[:, 5:10], mask[0, 0] = 255, (255, 0, 0)
    config, data = inspect(with_masks(tmp_path, [mask, mask, mask[..., 1]]), mask_values={255: 1})
    assert all((mask_of(data, config, str(n)) == (mask[..., 1] > 0)).all() for n in range(3))


def test_class_numbers_with_gaps_come_before_noise_around_a_few_of_them(tmp_path):
    """COCO-Stuff: 171 of the numbers 0 to 181, all of which fill areas, some far more than others."""
    numbers = [0, *(n for n in range(120) if n % 6)]
    mask = np.repeat(numbers, [100 if n in (0, 40, 80) else 4 for n in numbers])[:, None].repeat(64, 1)
    told = [line for line in ask(with_masks(tmp_path, [mask] * 3)).problems if 'type ' in line]
    assert told[0] == 'if they are class numbers, of which some may not occur, type num_classes=120 or more'
    assert any('noise around them' in line for line in told)
    assert inspect(tmp_path, num_classes=120)[1].coding.num_classes == 120


def test_of_many_negative_values_not_all_are_listed():
    """As in CT images that were taken for masks."""
    values = dict.fromkeys(range(-3000, 100), 1)
    told = train_unet.list_values(values, values, [*range(100)], {*range(-3000, 0)})
    assert told.startswith('3100 values') and told.endswith(' and 3052 more') and len(told) < 2000


@pytest.mark.parametrize('kind', ['L', '1', 'P'])
@pytest.mark.parametrize('beside', [True, False])
def test_white_that_is_typed_as_a_colour_is_so_in_masks_without_a_colour(tmp_path, kind, beside):
    """optipng and ImageMagick save these in grey, with one bit, or with a palette of greys."""
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[:, 5:10] = 255
    coloured = mask * np.uint8([1, beside, beside])                    # white, or red
    coloured[0, 0] = 255, 0, 0
    masks = [coloured, coloured, PIL.Image.fromarray(mask).convert('L').convert(kind)]
    config, data = inspect(with_masks(tmp_path, masks), mask_values={'#ffffff': 1, '#ff0000': 2})
    assert (mask_of(data, config, '2') == (mask[..., 0] > 0)).all() and train_unet.IGNORE not in data.classes


def test_white_of_16_bits_that_is_typed_as_ignored_is_so(tmp_path):
    folder, place = coded_set(tmp_path / 'set', [0] * 9 + [255] * 9 + [65535], kind='I;16')
    line = offered(ask(folder, ignore_index=65535), 'mask_values=')
    assert typed(line) == {'mask_values': {0: 0, 255: 1, 65535: 255}}
    config, data = inspect(folder, ignore_index=65535, **typed(line))
    assert (mask_of(data, config, '1') == np.array([0] * 9 + [1] * 9 + [255])[place]).all()


def test_what_is_typed_as_ignored_is_so_beside_masks_of_one_bit_too(tmp_path):
    masks = [PIL.Image.fromarray(block(1) > 0), block(1) + block(6, 8), block(3), block(7)]
    data = inspect(with_masks(tmp_path, masks), mask_values='nonzero', ignore_index=7)[1]
    assert data.meaning == {0: 0, 255: 1, 1: 1, 3: 1, 6: 1, 7: 255}


def test_white_in_grey_masks_is_void_where_no_colour_is_white(tmp_path):
    red, grey = np.zeros((16, 16, 3), np.uint8), np.zeros((16, 16), np.uint8)
    red[:, 5:10, 0], grey[:4] = 255, 255
    data = inspect(with_masks(tmp_path, [red, red, grey]), mask_values={'#000000': 0, '#ff0000': 1})[1]
    assert data.meaning[255] == 255


def test_white_of_grey_masks_is_listed_as_the_white_of_the_others(tmp_path):
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[:, 5:10], mask[0, 0] = 255, (255, 0, 0)
    first = ask(with_masks(tmp_path, [mask, mask, mask[..., 1]])).problems[0]
    assert "'#ffffff' (31.25%, 3 images)" in first and ' 255 (' not in first


def test_of_many_values_to_ignore_255_is_listed():
    values = dict.fromkeys([*range(-3000, 100), 255], 1)
    assert ', 255 (' in train_unet.list_values(values, values, [*range(100)], {*range(-3000, 0), 255})


# --- advice that can be followed ------------------------------------------------------


def test_all_but_black_of_jpeg_classes_takes_the_darkest_class_too(tmp_path):
    for n in range(6):
        mask = np.zeros((48, 48), np.uint8)
        mask[4 + n:14 + n, 4:14], mask[4 + n:14 + n, 19:29] = 60, 120
        save(tmp_path / f'images/{n}.png', np.zeros((48, 48, 3)) + n)
        noisy_jpeg(tmp_path / f'masks/{n}.jpg', mask)
    error = ask(tmp_path)
    assert 'if all but black is foreground' in str(error)
    config, data = inspect(tmp_path, **typed(offered(error, 'mask_values=">')))
    assert abs(mask_of(data, config, '0').mean() - 200 / 48 ** 2) < 0.01


def test_class_lines_beside_a_typed_number_of_classes_can_be_typed(tmp_path):
    for n in range(4):
        mask = np.zeros((16, 16))
        mask[2:5, 2:5], mask[8:11, 2:5], mask[8:11, 9:12] = 1, 2, 7
        save(tmp_path / f'images/{n}.png', np.zeros((16, 16, 3)) + n)
        save(tmp_path / f'masks/{n}.png', mask)
    line = next(line for line in ask(tmp_path, num_classes=3).problems if 'are the classes' in line)
    _, data = inspect(tmp_path, **{'num_classes': 3, **typed(line.partition('type ')[2])})
    assert data.coding.num_classes == 4
    error = str(ask(tmp_path, num_classes=3, mask_values={0: 0, 1: 1, 2: 2}))      # and those that fit stay as they are
    assert '7: 255' in error and 'num_classes=auto' not in error


def test_a_single_value_is_not_offered_as_the_only_class(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((16, 16, 3)) + n)
        save(tmp_path / f'masks/{n}.png', np.full((16, 16), 255))
    error = str(ask(tmp_path, num_classes=3))
    assert 'nothing but 255' in error and 'mask_values=' not in error


def test_several_values_to_ignore_are_offered_as_classes(tmp_path):
    said = train_unet.explain_values({254: [1, 1], 255: [1, 1]}, {}, {}, [], {254, 255}, False, False)
    assert 'if they are classes type mask_values=' in said[0]
