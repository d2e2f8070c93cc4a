"""Data: reading. Formats, depths, bands, rotation and palettes of images and masks, and what is refused.

Run: python -m pytest tests/test_reading.py
"""
import os
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import PIL.Image
import pytest
import scipy.io
import tifffile

import train_unet
from helpers import DISC, ask, block, coded_set, dataset, deep_colours, disc_set, fill, inspect, mask_of, offered, save
from helpers import with_masks
from train_unet import DataError


def codes_of(path):
    return train_unet.read_mask(str(path), train_unet.CONFIG)


# --- formats --------------------------------------------------------------------------


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


def test_another_format_is_one_line_of_the_readers(tmp_path, monkeypatch):
    """The table of suffixes and the reader of headers did not know of it."""
    monkeypatch.setitem(train_unet.READERS, '.dat', lambda path, *_: np.load(open(path, 'rb')))
    fill(tmp_path, [], [f'masks/{n}.png' for n in range(4)])
    (tmp_path / 'images').mkdir()
    for n in range(4):
        with open(tmp_path / f'images/{n}.dat', 'wb') as file:
            np.save(file, np.full((8, 8), 9 * n, np.uint8))
    _, data = inspect(tmp_path, in_channels=1)
    assert data.sizes == {(8, 8): 4} and len(data.pairs.images) == 4


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


def test_lit_pixels_of_a_bool_array_are_grey_in_grey(tmp_path):
    lit = np.zeros((2, 2, 3), bool)
    lit[0, 0, 0] = True
    np.save(tmp_path / 'x.npy', lit)
    assert train_unet.read_image(str(tmp_path / 'x.npy'), {**train_unet.CONFIG, 'in_channels': 1}).max() == 76


def test_an_array_whose_file_is_cut_while_it_is_read_is_named(tmp_path, monkeypatch):
    """What is mapped into memory ended the program: SIGBUS."""
    path, real = tmp_path / 'x.npy', np.load
    np.save(path, np.zeros((512, 512, 3), np.uint8))

    def load(*words, **settings):
        array = real(*words, **settings)
        os.truncate(path, 200)
        return array

    monkeypatch.setattr(np, 'load', load)
    with pytest.raises(train_unet.DataError, match='x.npy: cannot be read'):
        train_unet.read_image(str(path), train_unet.CONFIG)


def test_black_and_white_bmp_of_eight_bits_is_read_whole(tmp_path):
    """Pillow 13 takes it for one bit per pixel."""
    folder = with_masks(tmp_path, [block(1, row) for row in range(4)], '.bmp', [0, 0, 0, 255, 255, 255])
    config, data = inspect(folder)
    assert data.shares.tolist() == pytest.approx([5 / 6, 1 / 6])
    assert (mask_of(data, config, '2') == block(1, 2)).all()
    picture = train_unet.read_image(folder / 'masks/3.bmp', config)    # an image of this kind is read likewise
    assert (picture[..., 0] == block(255, 3)).all()


def test_small_tiffs_leave_no_file_open(tmp_path):
    image = np.zeros((40, 40, 3), np.uint8)
    config = train_unet.resolve_config()[0]
    opened = []
    for number in range(5):
        tifffile.imwrite(tmp_path / f'{number}.tif', image, photometric='rgb')
        opened.append(train_unet.open_image(str(tmp_path / f'{number}.tif'), config))
    assert all(isinstance(image, np.ndarray) for image in opened)
    assert not [name for name in os.listdir('/proc/self/fd')
                if str(tmp_path) in os.path.realpath(f'/proc/self/fd/{name}')]


def test_a_large_tiff_with_overviews_is_read_by_rows(tmp_path, monkeypatch):
    """Smaller copies of the image in the same file, as GDAL writes them, are no further pages."""
    image = np.random.default_rng(0).integers(0, 255, (160, 192, 3), dtype=np.uint8)
    how = {'photometric': 'rgb', 'tile': (32, 32), 'compression': 'zlib'}
    with tifffile.TiffWriter(tmp_path / 'pyramid.tif') as file:
        file.write(image, **how)
        file.write(image[::2, ::2].copy(), subfiletype=1, **how)
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 1000)
    config = {**train_unet.CONFIG, 'in_channels': 3, 'image_dtype': 'uint8'}
    rows = train_unet.open_image(tmp_path / 'pyramid.tif', config)
    assert isinstance(rows, train_unet.TiffRows) and rows.shape == (160, 192, 3)
    assert np.array_equal(rows[30:99], image[30:99])


def test_a_large_tiff_with_a_mask_of_its_own_is_read_by_rows(tmp_path, monkeypatch):
    """As GDAL writes it, of which pixels are there: it is no further image."""
    image = np.random.default_rng(0).integers(0, 256, (160, 192, 3), dtype=np.uint8)
    with tifffile.TiffWriter(tmp_path / 'x.tif') as file:
        file.write(image, photometric='rgb', tile=(32, 32), compression='zlib')
        file.write(np.ones(image.shape[:2], bool), subfiletype=4, photometric='mask')
    config = {**train_unet.CONFIG, 'in_channels': 3, 'image_dtype': 'uint8'}
    assert np.array_equal(train_unet.open_image(tmp_path / 'x.tif', config), image)
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 1000)
    rows = train_unet.open_image(tmp_path / 'x.tif', config)
    assert isinstance(rows, train_unet.TiffRows) and np.array_equal(rows[30:99], image[30:99])


@pytest.mark.parametrize('compression', ['zlib', None])
@pytest.mark.parametrize('missing', [0, 9])
def test_tiles_that_a_tiff_leaves_out_hold_no_data(tmp_path, monkeypatch, compression, missing):
    """As GDAL's SPARSE_OK does with what is empty. Uncompressed, Pillow takes the head of the file for them."""
    image = np.random.default_rng(0).integers(10, 255, (64, 96, 3), dtype=np.uint8)
    image[:32, 32:64] = image[32:, 64:] = missing
    parts = [image[top:top + 32, left:left + 32].copy() for top in (0, 32) for left in (0, 32, 64)]
    for name, shown, kind in (('x', image, 'rgb'), ('mask', image[..., 0], 'minisblack')):
        tiles = (None if part.max() == missing else part if shown.ndim == 3 else part[..., 0] for part in parts)
        tifffile.imwrite(tmp_path / f'{name}.tif', tiles, shape=shown.shape, dtype=np.uint8, photometric=kind,
                         tile=(32, 32), compression=compression, extratags=[(42113, 's', 0, f'{missing}', True)])
    assert np.array_equal(codes_of(tmp_path / 'mask.tif'), image[..., 0])
    config = {**train_unet.CONFIG, 'image_dtype': 'uint8'}
    assert np.array_equal(train_unet.open_image(tmp_path / 'x.tif', config), image)
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 1000)
    rows = train_unet.open_image(tmp_path / 'x.tif', config)
    assert isinstance(rows, train_unet.TiffRows) and np.array_equal(rows[0:64], image)


def test_a_large_tiff_of_another_scale_is_refused_as_a_small_one_is(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 65535, (64, 64, 3)).astype(np.float32)
    tifffile.imwrite(tmp_path / 'x.tif', pixels, photometric='rgb', rowsperstrip=4)
    config = train_unet.CONFIG | {'image_dtype': 'float32', 'mean': [0.5] * 3, 'std': [0.2] * 3}
    for largest in (2**25, 100):
        monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', largest)
        with pytest.raises(DataError, match='x.tif: values around 3.* are far from the mean of the training images'):
            train_unet.open_image(tmp_path / 'x.tif', config)
    assert isinstance(train_unet.open_image(tmp_path / 'x.tif', config | {'std': [1e4] * 3}), train_unet.TiffRows)


# --- depths ---------------------------------------------------------------------------


def test_depths_may_be_mixed(tmp_path):
    """8 and 16 bits of the same scene come out the same."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1], count=4)
    for n in range(4):
        value, kind = (100 * 257, 'I;16') if n % 2 else (100, None)
        save(folder / f'images/{n}.png', np.full((4, 16), value), kind)
    data, config = dataset(folder, val_fraction=0.25)
    assert config['image_dtype'] == 'float32'
    assert [data.read(i)[0].mean() for i in range(len(data))] == pytest.approx([100 / 255] * len(data))


@pytest.mark.parametrize('alpha, channels', [(False, 3), (True, 3), (True, 4)])
def test_colours_of_16_bits_keep_their_depth_and_order(tmp_path, alpha, channels):
    """Pillow would cut them to 8 bits."""
    values = deep_colours(tmp_path / 'x.png', alpha=alpha)
    image = train_unet.read_image(str(tmp_path / 'x.png'), {**train_unet.CONFIG, 'in_channels': channels})
    assert image.dtype == np.float32
    assert image == pytest.approx(values[..., :channels] / 65535, abs=1e-6)


@pytest.mark.parametrize('are_files', [False, True])
def test_masks_of_an_image_are_read_one_after_the_other(tmp_path, are_files):
    """All were held at once: 200 cells of 2048 x 2048 took 5 GB in each worker."""
    for n in range(40):
        save(tmp_path / f'{n}.png', 255 * np.eye(512, k=12 * n))
    tracemalloc.start()
    whole = codes_of(train_unet.UNITED.join(map(str, tmp_path.iterdir())) if are_files else tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.count_nonzero(whole) == sum(512 - 12 * n for n in range(40)) and peak < 20e6         # were 42e6 and more


@pytest.mark.parametrize('name, channels', [('x.jp2', 3), ('x.j2k', 3), ('x.jp2', 4)])
def test_colours_of_jpeg_2000_keep_their_depth_too(tmp_path, name, channels):
    """Satellites deliver it with 12 bits; Pillow would shift them into 8."""
    config = {**train_unet.CONFIG, 'in_channels': channels}
    for most, kind in ((4095, 'RGB48'), (65535, 'RGB48'), (255, ('RGB', 'RGBA')[channels - 3])):
        pixels = np.linspace(0, most, 32 * 32 * channels).reshape(32, 32, channels).round()
        cv2.imwrite(str(tmp_path / 'x.jp2'), pixels.astype(np.uint8 if most == 255 else np.uint16),
                    [cv2.IMWRITE_JPEG2000_COMPRESSION_X1000, 1000])
        content = (tmp_path / 'x.jp2').read_bytes()                    # a bare codestream is what follows the boxes
        (tmp_path / 'x.j2k').write_bytes(content[content.index(b'\xff\x4f\xff\x51'):])
        image = train_unet.read_image(str(tmp_path / name), config)
        assert train_unet.read_header(str(tmp_path / name), config)[2] == kind
        wanted = pixels[..., [2, 1, 0, 3][:channels]]
        assert image == pytest.approx(wanted if most == 255 else wanted / 65535, abs=1 if most == 255 else most / 6e6)


def test_the_depth_of_jpeg_2000_is_found_behind_large_boxes_and_beside_a_sign(tmp_path):
    cv2.imwrite(str(tmp_path / 'x.jp2'), np.zeros((32, 32, 3), np.uint16) + 4095)
    content = (tmp_path / 'x.jp2').read_bytes()
    at = content.index(b'jp2c') - 4
    box = struct.pack('>I', 100_008) + b'uuid' + bytes(100_000)
    (tmp_path / 'x.jp2').write_bytes(content[:at] + box + content[at:])
    assert train_unet.read_header(str(tmp_path / 'x.jp2'), train_unet.CONFIG)[2] == 'RGB48'
    cv2.imwrite(str(tmp_path / 'y.jp2'), np.zeros((32, 32, 3), np.uint8))
    content = bytearray((tmp_path / 'y.jp2').read_bytes())
    content[content.index(b'\xff\x4f\xff\x51') + 42] |= 128           # signed
    (tmp_path / 'y.jp2').write_bytes(content)
    assert train_unet.read_header(str(tmp_path / 'y.jp2'), train_unet.CONFIG)[2] == 'RGB'


def test_the_noise_of_black_in_united_jpeg_masks_is_black(tmp_path):
    for n in range(2):
        mask = np.full((16, 16), 24, np.uint8)
        mask[8 * n:8 * n + 8] = 255
        PIL.Image.fromarray(mask).save(tmp_path / f'{n}.jpg', quality=100)
    assert (codes_of(train_unet.UNITED.join(str(tmp_path / f'{n}.jpg') for n in range(2))) > 200).all()


def test_records_of_deep_jpeg_2000_from_before_are_made_anew(tmp_path, monkeypatch):
    """They said RGB: a set that had been looked at was refused as 16 bits with image_dtype=uint8."""
    (tmp_path / 'set/images').mkdir(parents=True)
    for n in range(4):
        pixels = np.random.default_rng(n).integers(0, 4096, (32, 32, 3)).astype(np.uint16)
        cv2.imwrite(str(tmp_path / f'set/images/{n}.jp2'), pixels)
        save(tmp_path / f'set/masks/{n}.png', np.eye(32, dtype=int))
    with monkeypatch.context() as patch:                               # as it was
        patch.setattr(train_unet, 'RECORDS', 27)
        patch.setattr(train_unet, 'pillow_mode', lambda picture: picture.mode)
        assert train_unet.find_image_dtype(inspect(tmp_path / 'set')[1]) == 'uint8'
    assert train_unet.find_image_dtype(inspect(tmp_path / 'set')[1]) == 'uint16'


def test_a_portable_pixmap_of_16_bits_keeps_them(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 65535, (4, 5, 3)).astype('>u2')
    (tmp_path / 'x.ppm').write_bytes(b'P6 5 4 65535\n' + pixels.tobytes())
    config = {**train_unet.CONFIG, 'image_dtype': 'float32'}
    assert np.allclose(train_unet.read_image(str(tmp_path / 'x.ppm'), config), pixels / 65535)
    assert train_unet.image_dtype_of(train_unet.read_header(str(tmp_path / 'x.ppm'), config)[2]) == 'uint16'


def test_the_alpha_of_a_mask_of_16_bits_is_taken(tmp_path):
    """It was left out, and all that its colours cover became foreground."""
    pixels = np.full((6, 5, 4), 200 * 257, np.uint16)
    pixels[2:, :, 3] = 0
    cv2.imwrite(str(tmp_path / 'x.png'), pixels)
    config = {**train_unet.CONFIG, 'mask_values': 'alpha', 'image_dtype': 'float32'}
    assert np.array_equal(train_unet.read_mask(str(tmp_path / 'x.png'), config), pixels[..., 3] >> 8)
    image = (pixels[..., :3] + 5).astype(np.uint16)
    cv2.imwrite(str(tmp_path / 'y.png'), image)
    assert np.allclose(train_unet.read_image(str(tmp_path / 'y.png'), config), image / 65535, atol=1e-6)


def test_jpeg_2000_keeps_16_bits(tmp_path):
    """As the bands of Sentinel-2 are published."""
    values = np.arange(64).reshape(8, 8) * 1000
    save(tmp_path / 'x.jp2', values, 'I;16')
    image = train_unet.read_image(str(tmp_path / 'x.jp2'), {**train_unet.CONFIG, 'in_channels': 1})
    assert np.array_equal(image[..., 0], (values / np.float32(65535)).astype(np.float32))


def test_16_bits_with_and_without_negative_values_have_one_scale(tmp_path):
    """Slices of a scan: whether one holds a negative value must not change how bright it is."""
    for name, low in (('a', 0), ('b', -5)):
        image = np.full((8, 8), 1000, np.int16)
        image[0, 0] = low
        tifffile.imwrite(tmp_path / f'{name}.tif', image)
    a, b = (train_unet.read_image(str(tmp_path / f'{n}.tif'), {**train_unet.CONFIG, 'in_channels': 1}) for n in 'ab')
    assert a[1, 1] == b[1, 1] == 1000


@pytest.mark.parametrize('dtype, values', [(np.uint32, [0, 2**31 + 5]), (np.int8, [-100, 100])])
def test_depths_that_pillow_would_wrap(tmp_path, dtype, values):
    tifffile.imwrite(tmp_path / 'x.tif', np.array([values] * 4, dtype))
    config, _, _ = train_unet.resolve_config(None, {'data': str(tmp_path), 'in_channels': 1})
    read = train_unet.read_image(tmp_path / 'x.tif', config)
    assert read[0, :, 0].tolist() == pytest.approx(values)


def test_the_order_of_bytes_changes_nothing(tmp_path):
    array = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for name, kind in (('little', '<u2'), ('big', '>u2')):
        np.save(tmp_path / f'{name}.npy', array.astype(kind))
    one, other = (train_unet.read_image(str(tmp_path / f'{name}.npy'), train_unet.CONFIG) for name in ('little', 'big'))
    assert np.array_equal(one, other) and one.max() <= 1


# --- bands ----------------------------------------------------------------------------


@pytest.mark.parametrize('dtype, channels', [(np.uint8, 4), (np.uint16, 4), (np.uint16, 3)])
def test_bands_beyond_red_green_blue_are_kept_at_their_depth(tmp_path, dtype, channels):
    """NAIP: red, green, blue and near infrared; Pillow would drop the fourth, or cut 16 bits to 8."""
    values = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (6, 5, channels)).astype(dtype)
    extra = {'extrasamples': ['unspecified']} if channels == 4 else {}
    tifffile.imwrite(tmp_path / 'x.tif', values, photometric='rgb', **extra)
    image = train_unet.read_image(str(tmp_path / 'x.tif'), {**train_unet.CONFIG, 'in_channels': channels})
    assert image == pytest.approx(values / (65535 if dtype == np.uint16 else 1), abs=1e-4)


def test_a_stack_for_a_network_that_is_trained_is_told_what_it_wants(tmp_path):
    for suffix, told in (('tif', True), ('npy', False)):
        path = str(tmp_path / f'x.{suffix}')
        (tifffile.imwrite if told else np.save)(path, np.ones((9, 8, 5), np.uint8))
        with pytest.raises(DataError) as caught:
            train_unet.read_image(path, {**train_unet.CONFIG, 'mean': [0.0] * 3})
        assert ('each page wants a file of its own' in str(caught.value)) is told


def test_a_fourth_band_of_an_array_is_not_dropped(tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (8, 8, 4)).astype(np.uint8)
    np.save(tmp_path / 'x.npy', array)
    with pytest.raises(DataError, match='type in_channels=4'):
        train_unet.read_image(str(tmp_path / 'x.npy'), train_unet.CONFIG)
    array[..., 3] = 255                                                # an opaque alpha
    np.save(tmp_path / 'x.npy', array)
    assert train_unet.read_image(str(tmp_path / 'x.npy'), train_unet.CONFIG).shape == (8, 8, 3)


def test_a_fourth_band_of_an_array_is_not_lost_whatever_its_suffix(tmp_path):
    path = tmp_path / 'x.NPY'
    with open(path, 'wb') as file:
        np.save(file, np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8))
    with pytest.raises(DataError, match='has 4 channels'):
        train_unet.read_image(path, {**train_unet.CONFIG, 'image_dtype': 'uint8'})


def test_arrays_with_bands_first_are_told_what_to_type(tmp_path):
    for n in range(4):
        save(tmp_path / f'set/masks/{n}.png', np.eye(16))
        (tmp_path / 'set/images').mkdir(exist_ok=True)
        np.save(tmp_path / f'set/images/{n}.npy', np.zeros((4, 16, 16), np.float32))
    assert 'if its bands come first type in_channels=4' in str(ask(tmp_path / 'set'))
    assert inspect(tmp_path / 'set', in_channels=4)[1].sizes == {(16, 16): 4}


def test_a_tiff_with_a_page_for_each_row_is_told_what_to_type(tmp_path):
    """tifffile writes (H, W, 13) as H pages unless it is told otherwise."""
    for n in range(4):
        save(tmp_path / f'set/masks/{n}.png', np.eye(16)[:, :12])
        (tmp_path / 'set/images').mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f'set/images/{n}.tif', np.zeros((16, 12, 13), np.uint8))
    told = str(ask(tmp_path / 'set'))
    assert 'if its bands come last type in_channels=13' in told and 'rescale_masks' not in told
    assert inspect(tmp_path / 'set', in_channels=13)[1].sizes == {(16, 12): 4}


# --- rotation -------------------------------------------------------------------------


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


@pytest.mark.parametrize('orientation, size', [(3, (16, 4)), (6, (4, 16))])
def test_images_that_their_exif_turns_are_counted(tmp_path, orientation, size):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    exif = PIL.Image.Exif()
    exif[274] = orientation
    PIL.Image.new('RGB', size).save(folder / 'images/0.png', exif=exif)
    _, data = inspect(folder)
    assert data.modes[f'RGB (turned upright, EXIF {orientation}) image, L mask'] == 1
    says_nothing = orientation == 3                                    # of sizes: turned by half they stay the same
    assert any('as the EXIF tag says' in note and '0.png: are the masks' in note for note in data.notes) == says_nothing


def rotated(kind, path, pixels):
    """Write a picture that is to be shown upside down, as `kind` of file tells it."""
    picture, exif = PIL.Image.fromarray(pixels), PIL.Image.Exif()
    exif[274] = 3
    if kind == 'raw profile':                                          # as ImageMagick's mogrify -format png writes it
        told, content = exif.tobytes(), PIL.PngImagePlugin.PngInfo()
        content.add_text('Raw profile type exif', f'\nexif\n{len(told):8}\n{told.hex()}\n')
        picture.save(path, pnginfo=content)
    elif kind == 'XMP':
        content = PIL.PngImagePlugin.PngInfo()
        content.add_itxt('XML:com.adobe.xmp', '<rdf:Description tiff:Orientation="3"/>')
        picture.save(path, pnginfo=content)
    else:
        tifffile.imwrite(path, pixels, extratags=[(274, 3, 1, 3, True)])


@pytest.mark.parametrize('kind, suffix', [('raw profile', 'png'), ('XMP', 'png'), ('TIFF', 'tif')])
def test_what_turns_an_image_is_told_wherever_it_is_written(tmp_path, kind, suffix):
    """Pillow turned these too: masks drawn by a program that does not lay upside down beside them, without a word."""
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    pixels = np.zeros((16, 12, 3), np.uint8)
    pixels[0] = 255
    (folder / 'images/0.png').unlink()
    rotated(kind, folder / f'images/0.{suffix}', pixels)
    save(folder / 'masks/0.png', np.eye(16, 12))
    config, data = inspect(folder)
    assert data.modes['RGB (turned upright, EXIF 3) image, L mask'] == 1
    assert any('are the masks upright?' in note for note in data.notes)
    image = train_unet.read_image(str(folder / f'images/0.{suffix}'), config)
    assert image[-1].all() and not image[:-1].any()
    (folder / 'masks/1.png').unlink()
    with pytest.raises(DataError, match='carries a rotation'):         # of a mask whose image lies as it is
        rotated(kind, folder / f'masks/1.{suffix}', pixels[..., 0])
        inspect(folder)
    if kind == 'TIFF':
        with pytest.raises(DataError, match='carries a rotation'):     # decoding a palette loses the tag
            palette = np.zeros((3, 256), np.uint16)
            tifffile.imwrite(folder / 'masks/1.tif', pixels[..., 0] // 255, photometric='palette', colormap=palette,
                             extratags=[(274, 3, 1, 3, True)])
            inspect(folder)


@pytest.mark.parametrize('dtype', [np.int16, np.uint16, np.int32, np.float32])
def test_compressed_tiffs_of_the_other_byte_order(tmp_path, dtype):
    """Java and old Macs write them; Pillow swaps the bytes of all but uint16 once too little."""
    values = np.arange(200, 212).reshape(3, 4).astype(dtype)
    tifffile.imwrite(tmp_path / 'x.tif', values, byteorder='>', compression='zlib')
    np.testing.assert_array_equal(train_unet.read_array(str(tmp_path / 'x.tif'), train_unet.CONFIG), values)


def test_16_bit_grey_is_16_bit_grey_in_a_pgm_too(tmp_path):
    for name in ('x.pgm', 'x.png'):
        PIL.Image.fromarray(np.full((4, 6), 300, np.uint16)).save(tmp_path / name)
        assert train_unet.image_dtype_of(train_unet.read_header(str(tmp_path / name), train_unet.CONFIG)[2]) == 'uint16'
    np.save(tmp_path / 'x.npy', np.full((4, 6), 300, '>u2'))
    assert train_unet.read_header(str(tmp_path / 'x.npy'), train_unet.CONFIG)[2] == 'uint16 x 1'


def test_masks_of_images_as_they_are_stored_are_not_stretched_over_those_turned_upright(tmp_path):
    """Drawn with a tool that does not know EXIF: 16 x 4 pixels, where the image is 4 x 16 as it is shown."""
    exif = PIL.Image.Exif()
    exif[274] = 6
    for n in range(4):
        save(tmp_path / f'set/masks/{n}.png', np.eye(4, 16))
        (tmp_path / 'set/images').mkdir(exist_ok=True)
        PIL.Image.new('RGB', (16, 4)).save(tmp_path / f'set/images/{n}.jpg', exif=exif)
    for how in {}, {'rescale_masks': 'stretch'}:
        told = str(ask(tmp_path / 'set', **how))
        assert 'as its EXIF tag says, the mask is not; save' in told and 'type rescale_masks' not in told


def test_an_orientation_of_0_turns_nothing(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.jpg' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    exif = PIL.Image.Exif()
    exif[274] = 0
    PIL.Image.new('RGB', (8, 8)).save(tmp_path / 'set/images/0.jpg', exif=exif)
    assert not any('EXIF' in mode for mode in inspect(tmp_path / 'set')[1].modes)


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


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_a_rotated_grey_tiff_is_turned_and_not_scrambled(tmp_path, dtype):
    pixels = np.arange(12 * 20, dtype=dtype).reshape(12, 20)
    tifffile.imwrite(tmp_path / 'x.tif', pixels, extratags=[(274, 'H', 1, 6, True)])
    seen = train_unet.read_array(str(tmp_path / 'x.tif'), {**train_unet.CONFIG, 'in_channels': 1})
    assert (seen == np.rot90(pixels, -1)).all()


def test_a_turned_tiff_of_16_bits_is_refused_not_taken_as_it_lies(tmp_path):
    tifffile.imwrite(tmp_path / 'x.tif', np.zeros((8, 8, 3), np.uint16), photometric='rgb',
                     extratags=[(274, 3, 1, 3, True)])
    with pytest.raises(DataError, match='carries a rotation'):
        train_unet.read_image(str(tmp_path / 'x.tif'), train_unet.CONFIG)


def test_an_orientation_of_0_turns_no_deep_tiff(tmp_path):
    pixels = np.arange(192, dtype=np.uint16).reshape(8, 8, 3)
    tifffile.imwrite(tmp_path / 'x.tif', pixels, photometric='rgb', extratags=[(274, 3, 1, 0, True)])
    assert (train_unet.read_array(str(tmp_path / 'x.tif'), train_unet.CONFIG) == pixels).all()


@pytest.mark.parametrize('mode', ['L', 'P', '1'])
@pytest.mark.parametrize('orientation', [3, 6, 7])
def test_a_mask_that_its_exif_turns_like_its_image(tmp_path, orientation, mode):
    """Who copies the EXIF of a photograph into its mask has both turned: the mask is read as upright as its image."""
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


# --- pixels of no data ----------------------------------------------------------------


def test_no_data_of_a_float_image_is_refused(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1])
    image = np.ones((8, 8), np.float32)
    image[0] = np.finfo(np.float32).min
    tifffile.imwrite(folder / 'images/0.tif', image)
    (folder / 'images/0.png').unlink()
    config, _, _ = train_unet.resolve_config(None, {'data': str(folder), 'in_channels': 1})
    with pytest.raises(DataError, match=r'0\.tif: holds pixels that are not finite .*no data'):
        train_unet.read_image(folder / 'images/0.tif', config)


def test_pixels_of_no_data_are_named(tmp_path, monkeypatch):
    heights = np.random.default_rng(0).random((8, 8)).astype(np.float32)
    for name, tag in (('none', None), ('whole', '-9999'), ('rim', '-9999')):
        heights[0] = -9999 if name == 'rim' else heights[0]
        tifffile.imwrite(tmp_path / f'{name}.tif', heights, extratags=[(42113, 's', 0, tag, True)] if tag else [])
    config = {**train_unet.CONFIG, 'in_channels': 1, 'image_dtype': 'float32'}
    for name in ('none', 'whole'):
        train_unet.read_image(str(tmp_path / f'{name}.tif'), config)
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 0)
    rows = train_unet.open_image(str(tmp_path / 'rim.tif'), config)    # of a large one, when its rows are read
    with pytest.raises(DataError, match='rim.tif: holds pixels of no data .-9999, GDAL_NODATA'):
        rows[0:8]
    with pytest.raises(DataError, match='rim.tif: holds pixels of no data .-9999, GDAL_NODATA'):
        train_unet.read_image(str(tmp_path / 'rim.tif'), config)


# --- masks ----------------------------------------------------------------------------


CODES = np.random.default_rng(3).integers(0, 2, (9, 7)).astype(bool)


def test_true_of_a_bool_tiff_is_true(tmp_path):
    """tifffile writes True as black, which Pillow shows as 0, and ImageJ 255; a scan in black and white means its
    colours."""
    tifffile.imwrite(tmp_path / 'bool.tif', CODES)
    tifffile.imwrite(tmp_path / 'imagej.tif', CODES * np.uint8(255), photometric='miniswhite',
                     description='ImageJ=1.54f', metadata=None)        # no second description
    grey = PIL.Image.fromarray(CODES * np.uint8(255))                  # 8 bits of another program: what is shown
    grey.save(tmp_path / 'grey.tif', tiffinfo={262: 0})
    PIL.Image.fromarray(CODES).save(tmp_path / 'scan.tif', tiffinfo={262: 0}, compression='group4')
    for name in ('bool.tif', 'imagej.tif', 'grey.tif', 'scan.tif'):
        assert (codes_of(tmp_path / name) == 255 * CODES).all()


def test_numbers_that_tifffile_was_given_are_those_of_a_mask_however_they_are_shown(tmp_path):
    """A set whose masks have white as zero or black, and 8 bits or 16: none is upside down. Images are as shown."""
    for number, kind in enumerate(['miniswhite', 'minisblack'] * 2):
        save(tmp_path / f'set/images/{number}.png', np.zeros((9, 7, 3)))
        (tmp_path / 'set/masks').mkdir(exist_ok=True)
        stored = CODES * (np.uint16 if number > 1 else np.uint8)(255)
        tifffile.imwrite(tmp_path / f'set/masks/{number}.tif', stored, photometric=kind)
    config, data = inspect(tmp_path / 'set')
    assert all((mask_of(data, config, str(number)) == CODES).all() for number in range(4))
    seen = [train_unet.read_image(tmp_path / f'set/masks/{number}.tif', config) for number in (0, 1)]
    assert (seen[0] == 255 - seen[1]).all()


def test_masks_that_torch_wrote_have_their_channel_first(tmp_path):
    folder, _ = coded_set(tmp_path / 'set', [0, 1, 2])
    mask = np.arange(96).reshape(1, 6, 16) % 3
    for n in range(3):
        (folder / f'masks/{n}.png').unlink()
        np.save(folder / f'masks/{n}.npy', mask)
    config, data = inspect(folder)
    assert np.array_equal(mask_of(data, config, '0'), mask[0])


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


def test_the_mask_beside_an_image_in_a_matlab_file_is_not_the_image(tmp_path):
    """Brain tumors of figshare: cjdata.image and cjdata.tumorMask."""
    path, mask = str(tmp_path / 'x.mat'), np.eye(8, dtype=np.uint8)
    scipy.io.savemat(path, {'cjdata': {'image': mask + 90, 'tumorMask': mask}})
    assert (train_unet.read_mask(path, train_unet.CONFIG) == mask).all()
    with pytest.raises(DataError, match='holds 2 matrices; expected one: image, tumorMask'):
        train_unet.read_image(path, train_unet.CONFIG)


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


def test_noise_of_jpeg_hides_nothing_where_masks_are_united(tmp_path):
    y, x = np.mgrid[:64, :64]
    halves = [((y - 32) ** 2 + (x - 32) ** 2 < 200) & side for side in (x < 29, x >= 29)]
    for part, half in enumerate(halves):                               # they touch at a seam
        PIL.Image.fromarray((255 * half).astype(np.uint8)).save(tmp_path / f'{part}.jpg', quality=60)
    whole = codes_of(train_unet.UNITED.join(str(tmp_path / f'{part}.jpg') for part in (0, 1)))
    lost = (halves[0] | halves[1]) & (whole < 128)
    seen = [codes_of(tmp_path / f'{part}.jpg') >= 128 for part in (0, 1)]
    assert (seen[0] | seen[1]).any() and not (lost & (seen[0] | seen[1])).any()


def test_a_mask_of_class_numbers_is_not_united_with_others_of_its_image(tmp_path):
    """p1_classes.png of 0, 1 and 2 beside p1_tissue.png of black and white."""
    numbers = np.arange(16).reshape(4, 4) // 4 % 3
    for n in range(3):
        save(tmp_path / f'p{n}/images/p{n}.png', np.zeros((4, 4, 3)) + n)
        save(tmp_path / f'p{n}/masks/p{n}_classes.png', numbers)
        save(tmp_path / f'p{n}/masks/p{n}_tissue.png', 255 * (numbers > 0))
    assert 'p0_classes.png holds several numbers, as of classes' in str(ask(tmp_path))
    for pattern, found in (('{stem}_tissue.png', 2), ('{stem}_classes.png', 3)):
        assert inspect(tmp_path, mask_pattern=pattern)[1].coding.num_classes == found
    for n in range(3):
        save(tmp_path / f'p{n}/masks/p{n}_classes.png', np.arange(16).reshape(4, 4) * 17)      # soft edges are fine
    assert inspect(tmp_path)[1].coding.num_classes == 2


def test_colours_of_16_bits_that_stand_for_8_are_read_as_these(tmp_path):
    colours = np.array([[[255, 255, 255], [255, 0, 255], [0, 1, 0]]], np.uint16) * 257
    tifffile.imwrite(tmp_path / 'x.tif', colours, photometric='rgb')
    assert (codes_of(tmp_path / 'x.tif') == train_unet.COLOUR + np.array([[0xffffff, 0xff00ff, 0x000100]])).all()


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


@pytest.mark.parametrize('name, pixels, words', [
    ('deep.npy', np.array([[[1, 0, 0]], [[0, 256, 0]]], np.uint16), 'holds colours beyond 8 bits'),
    ('wide.npy', np.array([[[-1, 0, 0]], [[0, 2, 0]]], np.int32), 'holds colours beyond 8 bits'),
    ('planes.npy', np.eye(4, dtype=np.uint8).reshape(2, 2, 4), 'a mask of the shape .2, 2, 4.')])
def test_what_is_no_colour_of_a_mask_is_refused(tmp_path, name, pixels, words):
    np.save(tmp_path / name, pixels)
    with pytest.raises(DataError, match=words):
        codes_of(tmp_path / name)


@pytest.mark.parametrize('value', [-2**32, 2**32, -3e38])
def test_a_number_that_does_not_fit_is_refused_not_wrapped(tmp_path, value):
    coded_set(tmp_path / 'set', [0, 1])
    save(tmp_path / 'set/masks/0.npy', np.full((4, 16), value))
    os.remove(tmp_path / 'set/masks/0.png')
    with pytest.raises(DataError, match='0.npy: holds the number .*must be below'):
        inspect(tmp_path / 'set')


@pytest.mark.parametrize('dtype', [np.float32, np.int32])
def test_no_data_of_a_geotiff_mask_is_ignored(tmp_path, dtype):
    """QGIS and GDAL write the lowest number of 32 bits."""
    pixels = np.full((4, 16), 1, dtype)
    pixels[0] = np.finfo(dtype).min if dtype == np.float32 else np.iinfo(dtype).min
    tifffile.imwrite(tmp_path / 'mask.tif', pixels)
    assert codes_of(tmp_path / 'mask.tif')[:2, 0].tolist() == [-1, 1]


def test_fractions_in_masks_of_three_bands_are_refused(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'masks/{n}.npy', np.repeat(np.eye(8)[..., None] / 2, 3, axis=2))
    assert 'holds fractions' in str(ask(tmp_path))


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


# --- palettes of masks ----------------------------------------------------------------


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


@pytest.mark.parametrize('numbers', [[0, 255], [0, 1, 255]])
def test_a_palette_filled_up_with_zeros_keeps_what_is_to_be_ignored(tmp_path, numbers):
    """In an image without an object 255, the border, became background: the palette shows it as black."""
    mask = np.array(numbers, np.uint8).repeat(16).reshape(-1, 8)
    with_masks(tmp_path, [mask], palette=[0, 0, 0, 200, 30, 10] + [0] * 762)
    assert np.unique(codes_of(tmp_path / 'masks/0.png')).tolist() == numbers


@pytest.mark.parametrize('suffix', ['.png', '.tif', '.bmp'])
def test_a_palette_that_turns_greys_round_means_what_it_shows(tmp_path, suffix):
    """ImageJ's inverting table: where a mask shows no object it holds 255 alone, which is black."""
    ramp = [255 - n // 3 for n in range(768)]
    shown = np.eye(8, dtype=np.uint8)
    with_masks(tmp_path, [255 - 255 * shown, np.full((8, 8), 255, np.uint8)], suffix, ramp)
    for n, wanted in enumerate((255 * shown, 0 * shown)):
        np.testing.assert_array_equal(codes_of(tmp_path / f'masks/{n}{suffix}'), wanted)


def test_a_palette_of_classes_that_ends_in_black_keeps_its_numbers(tmp_path):
    """Cityscapes as its users save it: 0 is purple; 255, which only some files hold, is black as all behind 7 are."""
    masks = [np.arange(8).repeat(6)[None].repeat(32, 0) for _ in range(4)]
    for mask in masks[::2]:
        mask[28:] = 255
    palette = bytes.fromhex('804080 f423e8 464646 66669c be9999 999999 faaa1e dcdc00')
    coding = inspect(with_masks(tmp_path, masks, palette=[*palette, *[0] * (768 - 24)]))[1].coding
    assert coding.words == 'class indices 0 to 7; 255 is ignored'


def test_grey_gifs_are_read_by_their_greys(tmp_path):
    path = tmp_path / 'x.gif'
    PIL.Image.fromarray(np.array([[0, 128], [128, 255]], np.uint8)).convert('P').save(path)
    assert set(np.unique(train_unet.read_mask(str(path), train_unet.CONFIG))) == {0, 128, 255}


def test_a_grey_gif_is_no_palette_of_classes(tmp_path):
    assert offered(ask(with_masks(tmp_path, [block(38, row) for row in range(4)], '.gif')), 'mask_values="{38') \
        == 'mask_values="{38: 1}"'


# --- what cannot be read --------------------------------------------------------------


def test_an_empty_file_is_called_empty(small_set):
    (small_set / 'images/003.png').write_bytes(b'')
    assert 'images/003.png: cannot be read: is empty' in str(ask(small_set))


@pytest.mark.parametrize('suffix', ['.png', '.tif'])
@pytest.mark.parametrize('kind', ['images', 'masks'])
def test_pointers_of_git_lfs_are_called_so(small_set, kind, suffix):
    (small_set / kind / '003.png').unlink()
    path = small_set / kind / f'003{suffix}'
    path.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n')
    assert f'{path}: cannot be read: is a pointer of Git LFS' in str(ask(small_set))


def test_an_archive_of_arrays_is_told_what_to_become(small_set):
    config = train_unet.CONFIG | {'in_channels': 3}
    np.savez(small_set / 'one.npz', image=np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match='is an archive; of an .npz save the array alone with numpy.save'):
        train_unet.read_pillow(small_set / 'one.npz', config, as_mask=False)


@pytest.mark.parametrize('old, new, words', [(b'\r\n', b'\n', 'a PNG whose line ends were converted'),
                                             (b'IHDR', b'IHDX', 'a damaged PNG')])
def test_a_damaged_png_is_called_so(small_set, old, new, words):
    """Git converts the line ends of a file that it takes for text."""
    path = small_set / 'masks/003.png'
    path.write_bytes(path.read_bytes().replace(old, new))
    assert f'{path}: cannot be read: is {words}' in str(ask(small_set))


@pytest.mark.parametrize('kind, suffix', [('images', '.gif'), ('masks', '.gif'), ('masks', '.png'),
                                          ('images', '.webp')])
def test_a_film_is_refused_not_read_by_its_first_picture(small_set, kind, suffix):
    path = sorted((small_set / kind).iterdir())[0]
    first, *others = (PIL.Image.fromarray(np.roll(np.array(PIL.Image.open(path)), n, 0)) for n in range(3))
    path.unlink()
    first.save(path.with_suffix(suffix), save_all=True, append_images=others)
    assert f'{path.stem}{suffix}: cannot be read: holds 3 pictures' in str(ask(small_set))


def test_a_photograph_of_a_phone_that_carries_a_preview_is_no_film(small_set):
    """Its JPEG holds a second picture (MPO)."""
    path = small_set / 'images' / '003.png'
    picture = PIL.Image.open(path)
    picture.save(path.with_suffix('.jpg'), 'MPO', save_all=True, append_images=[picture.resize((8, 8))])
    path.unlink()
    assert len(inspect(small_set)[1].pairs.images) == 12


@pytest.mark.parametrize('name', ['x.tif', 'x.npy'])
def test_a_pipe_is_not_waited_for(tmp_path, name, make_pipe):
    make_pipe(tmp_path / name)
    with pytest.raises(DataError, match='is no file'):
        train_unet.open_image(tmp_path / name, train_unet.CONFIG)
    assert train_unet.flatness(str(tmp_path / name), train_unet.CONFIG) == 0


def test_a_file_that_is_not_there_is_told_in_words(tmp_path):
    """It was: No such file or directory: 'it'."""
    with pytest.raises(DataError, match=r'x\.png: cannot be read: there is no such file$'):
        train_unet.read_array(str(tmp_path / 'x.png'), train_unet.CONFIG)
