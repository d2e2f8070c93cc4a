"""Sets as they are given out: what public ones look like that misled this program once, and those of shared/.

Run: python -m pytest tests/test_real_sets.py
"""
import itertools
import json
import os
import re
import shutil
import time
import tracemalloc

import cv2
import numpy as np
import PIL.Image
import pytest

import train_unet
from conftest import SHARED
from helpers import ask, dataset, fill, inspect, names_of, offered, palette_mask, partners, save, typed, typed_lines
from helpers import noisy_jpeg, split_sizes, with_masks
from train_unet import DataError


def scene(number, size=24):
    """A picture (size, size, 3) that no other number has."""
    coarse = np.random.default_rng(number).integers(0, 256, (size // 4, size // 4, 3))
    return coarse.repeat(4, 0).repeat(4, 1)


COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]])


def corner(y, x, value=255, size=24):
    """A mask (24, 24) of a square."""
    mask = np.zeros((size, size), np.uint8)
    mask[y:y + 8, x:x + 8] = value
    return mask


# --- sets of shared/ ------------------------------------------------------------------


SETS = ('camvid', 'crackforest', 'isbi_em', 'nuclei_16bit', 'nuclei_dsb2018', 'sirst_infrared')


def shared(*parts):
    """A folder of the shared data; skips where there is none."""
    folder = SHARED.joinpath(*parts)
    if not folder.exists():
        pytest.skip(f'the shared data set {"/".join(parts)} is not on this machine')
    return folder


def check_images(name):
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


@pytest.mark.parametrize('name', SETS)
def test_real_set(name):
    """Classes, counts and shares are those that were measured when the set was made; and images are read rightly."""
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
    if name in ('nuclei_16bit', 'sirst_infrared'):
        check_images(name)                                             # here: what was found in the files is kept


# Folder, what is doubled where there is one image only (it cannot be split), the lines that errors
# must offer, one error after the other, number of classes, and the share of some value in %.
BY_COLOUR = 'mask_values="{\'#000000\''
CONVENTIONS = [
    ('01_instance_mask_dirs_dsb2018', None, [], 2, {1: 3.44}),
    ('02_label_suffix_uppercase_ext_crackforest', None, [['mask_values="{255: 1}"']], 2,
     {255: 1.39}),
    ('03_rgb_coded_three_suffixes_cwfid', ('001_', '002_'),
     [['images="images"', 'masks="annotations"'], [BY_COLOUR]], 3,
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
    ('12_rgba_colour_coded_labelmefacade', None, [[BY_COLOUR]], 8,
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


# --- names and folders that pair ------------------------------------------------------


def test_folders_of_masks_in_folders_named_after_images(tmp_path):
    """Train Images/{images1,masks1}, Test Image/{images2,masks2}: the mask says more than the image."""
    for folder, number, count in (('Train Images', 1, 8), ('Test Image', 2, 3)):
        fill(tmp_path, *([f'{folder}/{kind}{number}/{n}.png' for n in range(count)] for kind in ('images', 'masks')))
    data = inspect(tmp_path)[1]
    assert [len(names_of(data, split)) for split in ('train', 'val', 'test')] == [6, 2, 3]


@pytest.mark.parametrize('image', ['images/seg_{n}/x.png', 'images/{s}/manual/{n}.png', 'seg_{n}/images/x.png',
                                   'images/{room}/{n}.png', '{room}/images/{n}.png', 'raw/images/{n}.png'])
@pytest.mark.parametrize('by_hand', [False, True])
def test_a_word_for_masks_that_stands_beside_images_and_masks_tells_nothing(tmp_path, image, by_hand):
    """A room is named lab, a film seg_01."""
    names = [image.format(n=n, s=('train', 'val')[n % 2], room=('lab', 'office')[n % 2]) for n in range(6)]
    fill(tmp_path, names, [name.replace('images', 'masks') for name in names])
    above = image.partition('images')[0]
    folders = {kind: ('*/' if '{' in above else above) + kind for kind in ('images', 'masks')} if by_hand else {}
    pairs = inspect(tmp_path, **folders)[1].pairs
    assert len(pairs.images) == 6 and pairs.drawn.any() == ('{s}' not in image)
    assert all(image.replace(b'/images/', b'/masks/') == mask for image, mask in zip(pairs.images, pairs.masks))


def test_patterns_tell_what_is_what_in_a_folder_for_one_image_beside_others(tmp_path):
    """labelme's img_0_json/{img,label}.png beside JPEGImages and SegmentationClass, which were made of them."""
    fill(tmp_path, *([f'img_{n}_json/{own}.png' for n in range(4)] + [f'{folder}/{n}.png' for n in range(4)]
                     for own, folder in (('img', 'JPEGImages'), ('label', 'SegmentationClass'))))
    data = inspect(tmp_path, image_pattern='{stem}img.png', mask_pattern='{stem}label.png')[1]
    assert partners(data, tmp_path) == {f'img_{n}_json/img.png': f'img_{n}_json/label.png' for n in range(4)}


def test_numbers_in_names_of_folders_do_not_hide_which_is_above(tmp_path):
    names = [f'{a}/images/{n}' for a in (1, 2, 3) for n in (10, 11, 12)]
    for n, name in enumerate(names):
        save(tmp_path / f'{name}.png', scene(n))
        save(tmp_path / f'{name.replace("images/", "images/mask_")}.png', corner(0, 0))
    assert len(inspect(tmp_path)[1].pairs.images) == 9


@pytest.mark.parametrize('count', [20, 21, 22])
def test_suffixes_are_found_where_half_of_the_images_have_no_mask(tmp_path, count):
    for n in range(count):
        save(tmp_path / f'images/{n:02}.png', scene(n))
        if n % 2:
            save(tmp_path / f'masks/{n:02}_mask.png', corner(0, 0))
            save(tmp_path / f'masks/{n:02}_mask_1.png', corner(9, 9))
    data = inspect(tmp_path, skip_unpaired=True)[1]
    assert len(data.pairs.images) == count // 2
    assert all(train_unet.UNITED.encode() in path for path in data.pairs.masks)


def test_thumbnails_and_waste_bins_of_a_disk_are_no_data(tmp_path):
    for n in range(4):
        for folder in ('', '@eaDir/', '#recycle/', '$RECYCLE.BIN/', '__MACOSX/'):
            save(tmp_path / f'images/{folder}{n}.png', scene(n))
            save(tmp_path / f'masks/{folder}{n}.png', corner(0, 0))
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_images_without_a_defect_are_not_offered_the_masks_of_others(tmp_path):
    for n in range(8):
        for folder in ('good', 'defect'):
            save(tmp_path / f'{folder}/{n:03d}.bmp', scene(n, 48))
        save(tmp_path / f'ground_truth/{n:03d}_GT.bmp', corner(n, 2, size=48))
    error = ask(tmp_path)
    assert [line.split()[0] for line in typed_lines(error)] == ['images="defect"'] and 'bands' not in str(error)


def test_bands_in_folders_of_their_own_are_to_be_joined(tmp_path):
    """38-Cloud: each band was offered for itself, and nothing was said of the others."""
    bands = ('red', 'green', 'blue', 'nir')
    for n in range(6):
        for band in bands:
            save(tmp_path / f'train_{band}/{band}_patch_{n}.TIF', scene(n, 48)[..., 0])
        save(tmp_path / f'train_gt/gt_patch_{n}.TIF', corner(n, 2, size=48))
    error = ask(tmp_path)
    assert {line.split()[0] for line in typed_lines(error)} == {f'images="train_{band}"' for band in bands}
    assert any('the bands of one image join them first' in line for line in error.problems)
    for band in bands[1:]:
        shutil.rmtree(tmp_path / f'train_{band}')
    shutil.copytree(tmp_path / 'train_gt', tmp_path / 'train_labels')
    assert 'bands of one' not in (told := str(ask(tmp_path))) and 'train_labels' in told


def test_the_name_of_a_folder_stands_for_those_further_down(tmp_path):
    """What an error names, `several folders could hold the images: Raw image, image`, can be typed."""
    for split in ('train', 'val'):
        for n in range(4):
            for folder in ('Raw image', 'image'):
                save(tmp_path / f'{split}/{folder}/{split}{n}.png', scene(n))
            save(tmp_path / f'{split}/mask/{split}{n}.png', np.eye(24))
    data = inspect(tmp_path, images='image', masks='mask')[1]
    assert partners(data, tmp_path) == {f'{split}/image/{split}{n}.png': f'{split}/mask/{split}{n}.png'
                                        for split in ('train', 'val') for n in range(4)}
    assert names_of(data, 'val') == {f'val{n}' for n in range(4)}
    assert 'there is no such folder' in str(ask(tmp_path, images='image', masks='masks'))


def test_a_line_that_makes_an_image_its_own_mask_is_not_tried(tmp_path):
    """It ended in a traceback."""
    for folder in ('A 1', 'A 2'):
        for n in range(6):
            save(tmp_path / f'{folder}/{n:03}.bmp', scene(n))
            save(tmp_path / f'{folder}/{n:03}.png', np.eye(24))
    save(tmp_path / 'A 1/extra.bmp', scene(9))
    ask(tmp_path, images='A *', masks='A *', image_pattern='{stem}.bmp', mask_pattern='{stem}.png')


@pytest.mark.parametrize('place', ['A *', '*', '.'])
def test_a_folder_that_holds_both_may_be_typed_for_both(tmp_path, place):
    """Each file was taken twice: several files share one stem, x and x."""
    for folder, n in itertools.product(('A 1', 'A 2'), range(6)):
        save(tmp_path / f'{folder}/{n:03}.bmp', scene(n))
        save(tmp_path / f'{folder}/{n:03}.png', np.eye(24))
    how = {'image_pattern': '{stem}.bmp', 'mask_pattern': '{stem}.png'}
    pairs = partners(inspect(tmp_path, images=place, masks=place, **how)[1], tmp_path)
    assert len(pairs) == 12 and all(mask == image.replace('.bmp', '.png') for image, mask in pairs.items())


def test_many_files_of_one_stem_do_not_fill_the_screen(tmp_path):
    for n in range(30):
        save(tmp_path / f'masks/s{n}/x.png', corner(0, 0))
    for name in 'xyz':
        save(tmp_path / f'images/{name}.png', scene(0))
        save(tmp_path / f'masks/t/{name}.png', corner(0, 0))
    error = ask(tmp_path)
    assert max(line.count('x.png') for line in error.problems) < 6 and '... and 27 more' in str(error)


def test_what_is_ignored_for_one_reason_takes_one_line(tmp_path):
    """A folder for each of a thousand lesions, and files without an ending."""
    fill(tmp_path, [f'images/{n}.png' for n in range(6)], [f'masks/{n}.png' for n in range(6)])
    for n in range(6):
        save(tmp_path / f'IMD{n:03d}_lesion/{n}.png', np.eye(8))
        (tmp_path / f'scan-{n}').write_bytes(b'no suffix')
    notes = inspect(tmp_path)[1].notes
    assert sum('whose name is neither of images nor of masks' in note for note in notes) == 1
    assert 'ignored 6 files, without an ending such as .png: scan-0, ...' in notes


@pytest.mark.parametrize('half, below', [('images', ''), ('masks', ''), ('images', 'train'), ('images/train', 'train'),
                                         ('images/480p', '480p')])
def test_one_folder_too_low_is_told(tmp_path, half, below):
    for n in range(4):
        save(tmp_path / 'set/images' / below / f'{n}.png', scene(n))
        save(tmp_path / 'set/masks' / below / f'{n}.png', corner(0, 0))
    line, = [line for line in ask(tmp_path / 'set' / half).problems if 'the other half lies beside it' in line]
    assert line.endswith(f'type data={tmp_path}/set')
    (tmp_path / 'set/masks').rename(tmp_path / 'set/other')
    assert 'other half' not in str(ask(tmp_path / 'set/images'))


def test_a_set_among_others_is_no_half(tmp_path):
    """A folder of data sets: one holds polygons, and others are called images and labels."""
    for name in 'ab':
        save(tmp_path / f'eye-segmentation/images/{name}.png', scene(0))
    save(tmp_path / 'skin-images/images/0.png', scene(1))
    save(tmp_path / 'road_labels/masks/0.png', corner(0, 0))
    assert 'other half' not in str(ask(tmp_path / 'eye-segmentation'))


def test_a_folder_within_a_project_named_after_masks_is_no_half(tmp_path):
    """zip_masks/set beside dcm_images/set: other projects."""
    for name in ('zip_masks/set/a.png', 'dcm_images/set/b.png'):
        save(tmp_path / name, scene(0))
    assert 'other half' not in str(ask(tmp_path / 'zip_masks/set'))


def test_archives_are_to_be_unpacked(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [])
    (tmp_path / 'masks.zip').write_bytes(b'PK')
    assert 'ignored masks.zip, to be unpacked first if meant' in ask(tmp_path).problems
    (tmp_path / 'masks.zip').rename(tmp_path / 'masks.tar.gz')
    assert 'ignored masks.tar.gz, to be unpacked first if meant' in ask(tmp_path).problems
    (tmp_path / 'masks.tar.gz').rename(tmp_path / 'im0001.ppm.gz')     # STARE
    assert 'ignored im0001.ppm.gz, to be unpacked first if meant' in ask(tmp_path).problems


@pytest.mark.parametrize('photos, masks', [('elsewhere', 'masks'), ('elsewhere/pics', 'labels')])
def test_images_given_by_their_whole_path_beside_data_by_a_part_get_a_line(tmp_path, photos, masks):
    for n in range(8):
        save(tmp_path / photos / f'pic_{n}_x.png', scene(n))
        save(tmp_path / f'set/{masks}/{n}_m.png', corner(n, n))
    save(tmp_path / photos / 'pic_9_x.png', scene(9))                  # has no mask
    assert typed_lines(ask('set', images=str(tmp_path / photos), masks=masks)) == ['skip_unpaired=True']


def test_a_list_of_files_on_another_drive(tmp_path, monkeypatch):
    """On Windows no path leads from C: to D:; here these two folders are drives."""
    for n in range(6):
        save(tmp_path / f'd/images/{n}.png', scene(n))
        save(tmp_path / f'd/masks/{n}.png', corner(n, n))
    rows = [f'{tmp_path}/d/images/{n}.png,{tmp_path}/d/masks/{n}.png' for n in range(6)]
    listed = tmp_path / 'c/list.csv'
    listed.parent.mkdir()
    listed.write_text('\n'.join(['image,mask', *rows]))
    real, drive = os.path.relpath, lambda path: os.path.abspath(path).startswith(str(tmp_path / 'c'))

    def relpath(path, start=os.curdir):
        if drive(path) != drive(start):
            raise ValueError('path is on another drive')
        return real(path, start)
    monkeypatch.setattr(os.path, 'relpath', relpath)
    _, data = inspect(listed)
    assert len(data.pairs.images) == 6


# --- lines that pair ------------------------------------------------------------------


def test_the_line_for_splits_of_other_names_takes_all_of_them(tmp_path):
    """The same with a second kind of masks, in folders whose names tell nothing."""
    for folder, number, count in (('Train Images', 1, 8), ('Test Image', 2, 3)):
        for n, kind in itertools.product(range(count), ('images', 'masks', 'annotated')):
            save(tmp_path / f'{folder}/{kind}{number}/{n}.png', np.eye(24) if kind == 'masks' else scene(n))
    assert 'images="*/images*" masks="*/masks*"   (11 pairs)' in str(ask(tmp_path))


def test_one_line_stands_for_trainset_and_testset(tmp_path):
    for folder, count in (('train', 4), ('test1', 6), ('test2', 4)):
        for n in range(count):
            save(tmp_path / f'{folder}/imgs/{folder}{n}.png', scene(n))
            for kind in ('masks_a', 'masks_b'):
                save(tmp_path / f'{folder}/{kind}/{folder}{n}.png', np.eye(24))
    lines = [line.strip() for line in ask(tmp_path).problems if line.startswith('    ')]
    assert lines[0].startswith('images="*/imgs" masks="*/masks_')
    for folder in ('trainset', 'testset'):
        for kind in ('normal', 'abnormal'):
            for n in range(6):
                save(tmp_path / f'sets/Data/{folder}/{kind}/{n}.png', scene(n))
                save(tmp_path / f'sets/Data/{folder}/{kind}_mask/{n}.png', np.eye(24))
    lines = [line.split('   ')[1] for line in ask(tmp_path / 'sets').problems if line.startswith('    ')]
    assert {line.strip() for line in lines} == {f'images="Data/*/{kind}" masks="Data/*/{kind}_mask"'
                                                for kind in ('normal', 'abnormal', '*')}


def test_the_line_for_training_comes_before_those_of_larger_tests(tmp_path):
    for folder, images, masks in (('train', 'imgs', 'masks'), ('test1', 'imgs/ETIS', 'masks/ETIS_GT'),
                                  ('test2', 'imgs/CVC_Original', 'masks/CVC_GT')):
        for n in range(4 if folder == 'train' else 7):
            save(tmp_path / f'{folder}/{images}/{n}.png', scene(n))
            save(tmp_path / f'{folder}/{masks}/{n}.png', np.eye(24))
    line = next(line for line in ask(tmp_path).problems if line.startswith('    '))
    assert 'images="train/imgs" masks="train/masks"' in line


def test_what_has_the_size_of_the_masks_is_offered_alone(tmp_path):
    """Copies of half the size, in a folder whose name tells nothing."""
    for n in range(6):
        save(tmp_path / f'walk/left/{n}.png', scene(n, 24))
        save(tmp_path / f'data_left/{n}.png', scene(n, 48))
        for task in ('hand', 'arm'):
            save(tmp_path / f'labels/left_{task}_labels/{n}.png', np.eye(48))
    text = str(ask(tmp_path))
    assert 'images="data_left"' in text and 'images="walk' not in text and 'polygons' not in text


@pytest.mark.parametrize('name', ['classes.json', 'class_names.txt'])
def test_folders_that_are_taken_together_and_number_their_classes_otherwise_are_told(tmp_path, name):
    """Trains from the front and from the side: 3 is the nose here and the bogie there."""
    for at, view in enumerate(('front', 'side')):
        for n in range(6):
            save(tmp_path / f'{view}/images/{view}{n}.png', scene(6 * at + n))
            save(tmp_path / f'{view}/masks/{view}{n}.png', corner(n, 3, 1) + corner(12, 12, 2))
        (tmp_path / view / name).write_text('train\nnose\nwindow')
    told = lambda: [note for note in inspect(tmp_path)[1].notes if 'number is one class here' in note]
    assert told() == []
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'docs' / name).write_text('of another set')
    assert told() == []
    (tmp_path / 'side' / name).write_text('train\nwindow\nbogie')
    note, = told()
    assert note.startswith(f'{tmp_path}/front/{name} and {tmp_path}/side/{name} differ: ')
    _, data = inspect(typed(offered(note, 'data='))['data'])
    assert len(data.pairs.images) == 6 and not [note for note in data.notes if 'number is' in note]


def test_files_of_polygons_are_no_class_lists(tmp_path):
    """One for each image, here with a word of class lists in its name, and the same names in both folders."""
    for at, split in enumerate(('train', 'val')):
        for n in range(6):
            save(tmp_path / f'{split}/color_{n}.png', scene(6 * at + n))
            save(tmp_path / f'{split}/color_{n}_mask.png', corner(n, 3, 1))
            (tmp_path / split / f'color_{n}.json').write_text(f'{{"shapes": [{at}]}}')
    assert not [note for note in inspect(tmp_path)[1].notes if 'number is' in note]


@pytest.mark.parametrize('count', [5, 3])
def test_leaves_that_are_numbered_in_a_palette_of_each_image_are_offered_as_objects(tmp_path, count):
    """CVPPP: each leaf has a number, and each image colours of its own for them."""
    for n in range(10):
        save(tmp_path / f'images/{n}.png', scene(n))
        mask = np.zeros((24, 24), np.uint8)
        for leaf in range(1, 1 + max(1, count - n // 2)):
            mask[4 * leaf - 3:4 * leaf, n:n + 6] = leaf
        picture = PIL.Image.fromarray(mask).convert('P')
        shuffled = np.random.default_rng(n).permutation(60)[:count]
        picture.putpalette([0, 0, 0, *(int(4 * value) for value in shuffled for _ in range(3))])
        (tmp_path / 'masks').mkdir(exist_ok=True)
        picture.save(tmp_path / f'masks/{n}.png')
    error = ask(tmp_path)
    lines = [line for line in error.problems if 'mask_values=' in line]
    assert ('nonzero' in lines[0]) == (count == 5) and 'nonzero' in str(error)
    assert inspect(tmp_path, mask_values='nonzero')[1].coding.num_classes == 2
    table = typed(offered(lines[-1], 'mask_values='))
    assert inspect(tmp_path, **table)[1].coding.num_classes == count + 1


def test_test_images_that_validate_too_are_told(tmp_path):
    """Who has no test set copies val/: "all copies are on one side" was said of them."""
    for split, numbers in (('train', range(6)), ('val', range(10, 14)), ('test', range(10, 14))):
        for n in numbers:
            save(tmp_path / f'{split}/images/{n}.png', scene(n))
            save(tmp_path / f'{split}/masks/{n}.png', corner(n, 3))
    notes = [note for note in inspect(tmp_path)[1].notes if 'such as' in note]
    assert len(notes) == 1 and notes[0].startswith('4 images of the test split validate too, such as ')


def test_a_folder_of_results_beside_the_splits_does_not_take_them_apart(tmp_path):
    """A line for train/ alone came first, and none for all of them."""
    for n, split in enumerate(6 * ['train'] + 2 * ['val'] + 2 * ['test']):
        save(tmp_path / f'{split}/{split}{n}_img.png', scene(n))
        save(tmp_path / f'{split}_labels/{split}{n}_img.png', corner(n, 3))
        save(tmp_path / f'Predictions/{split}{n}_img.png.png', corner(n, 4))
    assert typed_lines(ask(tmp_path)) == ['skip_unpaired=True']
    assert split_sizes(inspect(tmp_path, skip_unpaired=True)[1]) == [6, 2, 2]


def test_masks_of_another_shape_and_too_few_of_them_get_a_line_for_each(tmp_path):
    for n in range(8):
        save(tmp_path / f'imgs/{n}.png', np.random.default_rng(n).integers(0, 256, (60, 96, 3)))
    for n in range(3):
        save(tmp_path / f'masks/{n}.png', np.pad(corner(n, 3), ((0, 33), (0, 72))))
    line, = typed_lines(ask(tmp_path))
    assert line == 'images="imgs" masks="masks" skip_unpaired=True'
    further = offered(ask(tmp_path, **typed(line)), 'rescale_masks=')
    assert len(inspect(tmp_path, **typed(line), **typed(further))[1].pairs.images) == 3


@pytest.mark.parametrize('classes, thin', [((0, 2, 8), False), ((0, 1, 4), False), ((0, 1, 2, 3), False),
                                           ((0, 3), True)])
def test_numbers_between_classes_that_come_of_resizing_are_told(tmp_path, classes, thin):
    """The default of most libraries interpolates. Drawn lines, of one class alone, are none."""
    for n in range(6):
        mask = np.zeros((120, 120), np.uint8)
        for k, value in enumerate(classes[1:]):
            mask[8 + 4 * n + 28 * k:30 + 4 * n + 28 * k, 20:90] = value
        if thin:
            mask[100, 10:90], mask[4:110, 100] = 1, (2, 1)[n % 2]
        save(tmp_path / f'images/{n}.png', scene(n, 120))
        save(tmp_path / f'masks/{n}.png', mask if thin else cv2.resize(cv2.resize(mask, (97, 97)), (120, 120)))
    found = [note for note in inspect(tmp_path)[1].notes if 'interpolation' in note]
    assert bool(found) == (len(classes) == 3)
    if found:
        _, data = inspect(tmp_path, **typed(offered(found[0], 'mask_values=')))
        assert data.coding.num_classes == 3 and 0 < data.classes[255][0] < 0.05 * 6 * 120**2


def test_a_thin_class_beside_numbers_that_come_of_resizing_stays_a_class(tmp_path):
    for n in range(6):
        mask = np.zeros((120, 120), np.uint8)
        mask[8 + 4 * n:30 + 4 * n, 20:90], mask[36 + 4 * n:58 + 4 * n, 20:90] = 2, 8
        mask = cv2.resize(cv2.resize(mask, (97, 97)), (120, 120))
        mask[110, 10:100] = 9                                          # a wire
        save(tmp_path / f'images/{n}.png', scene(n, 120))
        save(tmp_path / f'masks/{n}.png', mask)
    note, = [note for note in inspect(tmp_path)[1].notes if 'interpolation' in note]
    _, data = inspect(tmp_path, **typed(offered(note, 'mask_values=')))
    assert data.coding.num_classes == 4 and data.meaning[9] == 3


def test_classes_that_are_all_lines_are_no_edges(tmp_path):
    """Of resizing there is a thin rim, not a tenth of all pixels."""
    for n in range(6):
        mask = np.zeros((60, 60), np.uint8)
        mask[::10], mask[5::10], mask[20:30, 20:30] = 1, 2, 3
        save(tmp_path / f'images/{n}.png', scene(n, 60))
        save(tmp_path / f'masks/{n}.png', mask)
    assert 'interpolation' not in str(inspect(tmp_path)[1].notes)


def test_masks_laid_over_their_images_are_no_images_for_these_masks(tmp_path):
    """A program's output, test_output/ and test_output_merged/, without the images."""
    for n in range(9):
        save(tmp_path / f'p/out/{n}.png', corner(n, 3))
        photo = np.random.default_rng(n).integers(0, 256, (24, 24, 3))
        save(tmp_path / f'p/out_merged/{n}.png', np.where(corner(n, 3)[..., None] > 0, 255, photo))
    assert typed_lines(ask(tmp_path)) == []


def test_what_an_annotator_drew_is_offered_after_what_was_made_of_it(tmp_path):
    """CholecSeg8k: x_mask.png are strokes, x_watershed_mask.png the labels."""
    for n in range(12):
        save(tmp_path / f'f_{n}_endo.png', scene(n))
        for kind in ('', '_color', '_watershed'):
            save(tmp_path / f'f_{n}_endo{kind}_mask.png', np.eye(24))
    line = next(line for line in ask(tmp_path).problems if line.startswith('    '))
    assert line.split('   (')[0].strip() == 'mask_pattern="{stem}_watershed_mask.png" skip_unpaired=True'


def test_kinds_whose_count_fits_the_samples_are_all_offered(tmp_path):
    """CVPPP: four files for each of 36 plants; every ninth of the 144 is of the same kind."""
    for n in range(36):
        save(tmp_path / f'plant{n:03}_rgb.png', scene(n))
        save(tmp_path / f'plant{n:03}_label.png', corner(n % 9, 0, 1) + corner(9 + n % 7, 9, 2))
        save(tmp_path / f'plant{n:03}_fg.png', corner(n % 9, 0))
        save(tmp_path / f'plant{n:03}_centers.png', np.eye(24))
    line, = [line for line in ask(tmp_path).problems if line.startswith('    ')]
    assert line.strip().startswith('image_pattern="{stem}rgb.png" mask_pattern="{stem}label.png"   (36 ')


@pytest.mark.parametrize('image, mask', [('clip_img', 'matting'), ('first', 'second')])
def test_cut_outs_are_masks(tmp_path, image, mask):
    """AISegment: photographs, and the same again with all but the person made transparent."""
    for n in range(12):
        photo = np.random.default_rng(n).integers(0, 256, (24, 24, 3))
        save(tmp_path / f'{image}/{n // 6}/clip_{n // 3}/{n}.jpg', photo)
        cut_out = np.dstack([photo, corner(n, 3)])
        save(tmp_path / f'{mask}/{n // 6}/{mask}_{n // 3}/{n}.png', cut_out)
    words = typed(typed_lines(ask(tmp_path))[0]) if image == 'first' else {}
    words |= typed(offered(ask(tmp_path, **words), 'mask_values='))
    _, data = inspect(tmp_path, **words)
    assert words['mask_values'] == 'alpha' and data.classes[1] == (12 * 64, 12)


def test_a_copy_of_the_set_in_a_folder_named_after_masks_holds_no_masks_of_it(tmp_path):
    """Kaggle's LGG MRI: kaggle_3m/, and all of it again in lgg-mri-segmentation/kaggle_3m/."""
    for n in range(8):
        for folder in ('kaggle_3m', 'lgg-mri-segmentation/kaggle_3m'):
            name = tmp_path / folder / f'TCGA_{n // 4}/TCGA_{n // 4}_{n}'
            save(f'{name}.tif', scene(n))
            save(f'{name}_mask.tif', corner(n, 3))
    _, data = inspect(tmp_path)
    pairs = partners(data, tmp_path)
    assert len(pairs) == 16 and all(mask == image.replace('.tif', '_mask.tif') for image, mask in pairs.items())


def test_originals_are_offered_before_other_pictures(tmp_path):
    """AM-2k: bg/ are the places without the animal, fg/ the animal without the place."""
    for n, split in enumerate(['train'] * 8 + ['test'] * 4):
        for number, folder in enumerate(['original', 'bg', 'fg']):
            save(tmp_path / f'{split}/{folder}/{n}.png', scene(n + 20 * number))
        save(tmp_path / f'{split}/mask/{n}.png', corner(n, 3))
    assert typed_lines(ask(tmp_path))[0] == 'images="*/original" masks="*/mask"'


def test_ground_truths_pair_at_once(tmp_path):
    """QaTa-COV19."""
    for n, split in enumerate(['Train'] * 8 + ['Test'] * 4):
        save(tmp_path / f'{split} Set/Images/{n}.png', scene(n))
        save(tmp_path / f'{split} Set/Ground-truths/mask_{n}.png', corner(n, 3))
    _, data = inspect(tmp_path)
    assert len(partners(data, tmp_path)) == 12


def test_class_numbers_are_offered_before_the_colours_for_people(tmp_path):
    """Supervisely's masks_machine and masks_human."""
    for n in range(6):
        save(tmp_path / f'ds/img/{n}.png', scene(n, 64))
        save(tmp_path / f'ds/masks_machine/{n}.png', corner(0, 0, 1, 64) + corner(9, 9, 2, 64))
        save(tmp_path / f'ds/masks_human/{n}.png', np.repeat(corner(0, 0, 90, 64)[..., None], 3, 2))
    line = next(line for line in ask(tmp_path).problems if line.startswith('    '))
    assert 'masks="ds/masks_machine"' in line


def test_images_are_offered_beside_many_kinds_of_masks_by_two_people(tmp_path):
    """CryoNuSeg: the folder of the tissue has fewer files than each of what people made of it, overlays among them."""
    kinds = ['label masks', 'label masks modify', 'mask binary', 'mask binary without border']
    others, people = ['distance maps', 'weighted_maps', 'overlay'], ['1 (biologist)', '2 (bioinformatician)']
    for n in range(12):
        save(tmp_path / f'tissue images/Human_{n}.tif', scene(n))
        for person, kind in itertools.product(people, [*kinds, *others]):
            picture = scene(n + 50) if kind == 'overlay' else corner(n, 0) if kind in kinds else scene(n + 20)[..., 0]
            save(tmp_path / f'Annotator {person}/Annotator {person}/{kind}/Human_{n}.png', picture)
    lines = typed_lines(ask(tmp_path))
    assert lines and all(line.startswith('images="tissue images"') for line in lines)


@pytest.mark.parametrize('made', ['distance maps', 'dist', 'heatmaps', 'weightmap'])
def test_maps_made_of_masks_are_offered_where_there_is_nothing_else(tmp_path, made):
    """CryoNuSeg: "manual marks up" tells that all in it are masks."""
    for n in range(12):
        save(tmp_path / f'a/tissue images/{n}.png', scene(n))
        for kind in ('label masks', 'mask binary', made):
            save(tmp_path / f'a/manual marks up/{kind}/{n}.png', corner(n, 0))
        save(tmp_path / f'b/photos/{n}.png', scene(n))
        save(tmp_path / f'b/{made}/{n}.png', corner(n, 0))
    assert typed_lines(ask(tmp_path / 'a')) == [f'images="tissue images" masks="manual marks up/{kind}"'
                                                for kind in ('label masks', 'mask binary')]
    assert typed_lines(ask(tmp_path / 'b')) == [f'images="photos" masks="{made}"']


def test_pictures_made_of_masks_are_not_offered_where_a_folder_is_named_after_images(tmp_path):
    """CropAndWeed: labelIds/ and visualizations/ hold a folder for each of three readings, images/ is one."""
    for n in range(12):
        save(tmp_path / f'data/images/{n}.jpg', scene(n))
        for reading in ('CropAndWeed', 'CropOrWeed2', 'Fine24'):
            save(tmp_path / f'data/labelIds/{reading}/{n}.png', corner(n, 0, 1))
            save(tmp_path / f'data/visualizations/{reading}/{n}.jpg', scene(n + 20))
    lines = typed_lines(ask(tmp_path))
    assert len(lines) == 3 and all(line.startswith('images="data/images" masks="data/labelIds/') for line in lines)


def test_masks_in_folders_as_those_of_the_images_which_sound_like_images_are_offered(tmp_path):
    """UW-Madison's slices with masks drawn into the same folders: train_masks/case1/scans, of equal names in each."""
    names = [f'{{}}/case{case}/case{case}_day{day}/scans/slice_{n:04}.png' for case in (1, 2, 3) for day in (0, 7)
             for n in range(3)]
    fill(tmp_path, *([name.format(folder) for name in names] for folder in ('train', 'train_masks')))
    line = typed_lines(ask(tmp_path))[0]
    pairs = partners(inspect(tmp_path, **typed(line))[1], tmp_path)
    assert pairs == {name.format('train'): name.format('train_masks') for name in names}


def test_silver_truth_in_folders_of_their_own_is_offered(tmp_path):
    """The Cell Tracking Challenge: 01_ST holds SEG alone, 01_GT few of SEG and the markers of TRA."""
    for film in ('01', '02'):
        for n in range(12):
            save(tmp_path / f'{film}/t{n:03}.tif', scene(n))
            save(tmp_path / f'{film}_ST/SEG/man_seg{n:03}.tif', np.eye(24))
            save(tmp_path / f'{film}_GT/TRA/man_track{n:03}.tif', np.eye(24))
            if n % 3 == 0:
                save(tmp_path / f'{film}_GT/SEG/man_seg{n:03}.tif', np.eye(24))
    line = next(line for line in ask(tmp_path).problems if line.startswith('    '))
    assert line.split('   (')[0].strip() == 'images="*" masks="*_ST/SEG" skip_unpaired=True'
    pairs = partners(inspect(tmp_path, **typed(line.split('   (')[0]))[1], tmp_path)
    assert pairs == {f'{film}/t{n:03}.tif': f'{film}_ST/SEG/man_seg{n:03}.tif' for film in ('01', '02')
                     for n in range(12)}


def test_gold_truth_of_a_few_frames_is_offered_and_none_of_another_film(tmp_path):
    """The Cell Tracking Challenge again: TRA of all frames, SEG of three, and no ST."""
    for film, n in itertools.product(('01', '02'), range(12)):
        save(tmp_path / f'{film}/t{n:03}.tif', scene(n))
        save(tmp_path / f'{film}_GT/TRA/man_track{n:03}.tif', np.eye(24))
        if n % 4 == 1:
            save(tmp_path / f'{film}_GT/SEG/man_seg{n:03}.tif', np.eye(24))
    lines = typed_lines(ask(tmp_path))
    assert lines == [f'images="*" masks="*_GT/{kind}" skip_unpaired=True' for kind in ('TRA', 'SEG')]
    pairs = partners(inspect(tmp_path, **typed(lines[1]))[1], tmp_path)
    assert pairs == {f'{film}/t{n:03}.tif': f'{film}_GT/SEG/man_seg{n:03}.tif' for film in ('01', '02')
                     for n in (1, 5, 9)}


def paint(folder, **names):
    """For each kind a picture or, where its name says mask, a mask: {kind: relative names}."""
    for kind, several in names.items():
        for number, name in enumerate(several):
            is_mask = kind.startswith('mask')
            save(folder / name, corner(number, number, 1) if is_mask else scene(len(name) + 100 * number))


def test_masks_by_several_people_are_each_offered(tmp_path):
    """Gleason 2019: Maps1_T to Maps6_T, each of some of the images; none is of images named after another."""
    stems = [f'slide{n % 4}_core{n}' for n in range(8)]
    paint(tmp_path, images=[f'Train Imgs/{stem}.jpg' for stem in stems],
          masks1=[f'Maps1_T/{stem}_classimg.png' for stem in stems[:6]],
          masks2=[f'Maps2_T/{stem}_classimg.png' for stem in stems[3:]])
    lines = ' '.join(typed_lines(ask(tmp_path)))
    assert 'masks="Maps1_T"' in lines and 'masks="Maps2_T"' in lines


def test_masks_below_their_images_are_offered_where_another_folder_is_named_after_images(tmp_path):
    """Bacterial microcolonies: data/test/001.png, data/test/mask/001.png, and images/1.png of the README."""
    paint(tmp_path, images=['images/1.png', *(f'data/{split}/{n:03d}.png' for split in ('train', 'test')
                                              for n in range(6))],
          masks=[f'data/{split}/mask/{n:03d}.png' for split in ('train', 'test') for n in range(6)])
    line, = typed_lines(ask(tmp_path))
    assert line == 'images="data" masks="data/*/mask"'
    assert len(inspect(tmp_path, **typed(line))[1].pairs.images) == 12


def test_one_image_that_is_there_in_two_formats_hides_no_line(tmp_path):
    """Endothelium: image/3.tif beside image/3.jpg, which all others are, and raw images of other sizes."""
    names = [f'train/image/{n}.jpg' for n in range(12)]
    paint(tmp_path, images=[*names, 'train/image/3.tif'], masks=[f'train/mask/{n}.png' for n in range(8)])
    for number in range(12):
        save(tmp_path / f'train/Raw image/{number}.jpg', scene(number, 32)[:20])
    line, = typed_lines(ask(tmp_path))
    assert typed(line) == {'images': 'train/image', 'masks': 'train/mask', 'image_pattern': '{stem}.jpg',
                           'skip_unpaired': True}


def test_good_objects_get_no_masks_of_broken_ones(tmp_path):
    """VisA: Normal/0003.JPG is no image of Masks/Anomaly/003.png, of which Anomaly/003.JPG is."""
    for thing in ('candle', 'pcb'):
        paint(tmp_path / thing, good=[f'Data/Images/Normal/{n:04d}.JPG' for n in range(8)],
              broken=[f'Data/Images/Anomaly/{n:03d}.JPG' for n in range(5)],
              masks=[f'Data/Masks/Anomaly/{n:03d}.png' for n in range(5)])
    lines = typed_lines(ask(tmp_path))
    assert lines and not [line for line in lines if 'Normal' in line]


@pytest.mark.parametrize('right, wrong', [('{split}/Semantic_masks/images/{stem}_instance_color_RGB.png',
                                           '{split}/Instance_masks/images/{stem}_instance_id_RGB.png'),
                                          ('{split}/semantics/{stem}.png', '{split}/leaf_visibility/{stem}.png')])
def test_masks_of_classes_come_before_those_of_objects(tmp_path, right, wrong):
    """iSAID and PhenoBench."""
    names = lambda pattern: [pattern.format(split=split, stem=f'P{n}') for split in ('train', 'val') for n in range(4)]
    paint(tmp_path, images=names('{split}/images/{stem}.png'), masks=names(right), masks2=names(wrong))
    first, *others = typed_lines(ask(tmp_path))
    assert right.split('/')[1] in first and not [line for line in others if '_visibility' in line]


def test_one_black_image_or_one_noisy_mask_hides_no_line(tmp_path):
    """Of three pairs that are looked at the middle one counts."""
    for n in range(9):
        save(tmp_path / f'set/images/{n}.png', scene(n, 64) * (n != 4))
        for kind in 'ab':
            save(tmp_path / f'set/masks_{kind}/{n}.png', scene(n, 64)[..., 0] if (n, kind) == (0, 'a') else np.eye(64))
    lines = [line.split('   (')[0].strip() for line in ask(tmp_path / 'set').problems if line.startswith('    ')]
    assert lines == ['images="images" masks="masks_a"', 'images="images" masks="masks_b"']


@pytest.mark.parametrize('count', [6, 40])
def test_one_mask_of_another_name_is_left_out_by_a_line(tmp_path, count):
    """Nor does an image get the mask of another, 0.png that of 1.png."""
    for n in range(count):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n if n != 3 else "three"}.png', np.eye(24))
    lines = [line.strip() for line in ask(tmp_path).problems if line.startswith('    ')]
    assert lines == [f'images="images" masks="masks" skip_unpaired=True   ({count - 1} pairs)']


@pytest.mark.parametrize('image, mask', [('{}', '{}'), ('t{:02}', 'id_masks_{:02}')], ids=['numbers', 'with words'])
def test_names_that_are_numbered_otherwise_get_no_line(tmp_path, image, mask):
    """One counts from 0, the other from 1: equal numbers are not of one place (Usiigaci's frames)."""
    for n in range(10):
        save(tmp_path / f'images/{image.format(n + 1)}.png', scene(n))
        save(tmp_path / f'masks/{mask.format(n)}.png', np.eye(24))
    assert not any('skip_unpaired' in line for line in ask(tmp_path).problems)


@pytest.mark.parametrize('mask', ['Label_{}', 'Label_{:04}'])
def test_every_second_frame_gets_no_mask_of_half_its_number(tmp_path, mask):
    """frame0002, frame0004, ... and Label_1, Label_2, ...: half of the numbers are there on both sides."""
    for n in range(1, 21):
        save(tmp_path / f'images/frame{2 * n:04}.png', scene(n))
        save(tmp_path / f'masks/{mask.format(n)}.png', np.eye(24))
    error = ask(tmp_path)
    assert '10 pairs found' in str(error) and not typed_lines(error)


def test_numbers_alone_pair_nothing_where_files_are_left_over_on_both_sides(tmp_path):
    for n in range(1, 21):
        save(tmp_path / f'images/frame{2 * n:04}.png', scene(n))
        save(tmp_path / f'masks/Label_{n}.png', np.eye(24))
    (tmp_path / 'images/frame0040.png').unlink()
    assert '10 pairs found, perhaps by chance' in str(ask(tmp_path, skip_unpaired=True))


@pytest.mark.parametrize('settings', [{}, {'image_pattern': 'frame_{stem}.png', 'mask_pattern': '{stem}_gt.png'}])
def test_numbers_pair_where_a_file_is_left_over_on_each_side(tmp_path, settings):
    """No pattern says that 5 is 0005, and one file that lacks its partner is no doubt of the others."""
    for n in range(1, 22):
        if n != 20:
            save(tmp_path / f'images/frame_{n}.png', scene(n))
        if n != 7:
            save(tmp_path / f'masks/{n:04}_gt.png', np.eye(24))
    _, data = inspect(tmp_path, skip_unpaired=True, **settings)
    assert len(data.pairs.images) == 19


def test_masks_that_count_from_0_beside_more_images_from_1_get_no_line(tmp_path):
    """Tile000001 to Tile000030, of which the first ten have masks, mask_0 to mask_9: equal numbers are neighbours."""
    for n in range(30):
        save(tmp_path / f'raw/Tile{n + 1:06}.png', scene(n))
        if n < 10:
            save(tmp_path / f'masks/mask_{n}.png', np.eye(24))
    assert not typed_lines(ask(tmp_path))
    save(tmp_path / 'raw/Tile000000.png', scene(99))
    assert typed_lines(ask(tmp_path)) == ['images="raw" masks="masks" skip_unpaired=True']


def test_masks_below_a_folder_named_for_segmentation_are_all_offered(tmp_path):
    """COVID-QU-Ex: two sets, in folders whose names hold a word for masks; lung masks in both, infections in one."""
    for n in range(16):
        for data, kinds in {'Infection': ('infection', 'lung'), 'Lung': ('lung',)}.items():
            top = tmp_path / f'{data} Segmentation Data/{("Train", "Val")[n % 2]}/{("COVID-19", "Normal")[n // 2 % 2]}'
            save(top / f'images/{data}_{n}.png', scene(n + len(data)))
            for kind in kinds:
                save(top / f'{kind} masks/{data}_{n}.png', corner(n % 9, len(kind)))
    lines = [typed(line)['masks'] for line in typed_lines(ask(tmp_path))]
    assert {line.rsplit('/', 1)[-1] for line in lines} >= {'lung masks', 'infection masks'}


def test_a_set_that_is_there_in_two_formats_is_told(tmp_path):
    """Massachusetts roads on Kaggle: png/ and tiff/ hold the same images, and their folders name the split."""
    for n in range(12):
        for kind, suffix in (('png', 'png'), ('tiff', 'tif')):
            split = ('train', 'val', 'test')[n % 3]
            save(tmp_path / f'{kind}/{split}/{n}.{suffix}', scene(n))
            save(tmp_path / f'{kind}/{split}_labels/{n}.{suffix}', 255 * (np.arange(24) <= n) * np.ones((24, 1)))
    assert any(note.startswith('12 images with copies') for note in inspect(tmp_path)[1].notes)


@pytest.mark.parametrize('splits', [('train', 'val', 'test'), ('train', 'val')])
def test_raw_images_beside_a_folder_with_a_split_get_the_line_without_them(splits, tmp_path):
    """data/raw and data/processed, as cookiecutters lay it out."""
    for n in range(12):
        for place in ('raw', f'processed/{splits[n % len(splits)]}'):
            save(tmp_path / f'{place}/images/{n}.png', scene(n))
            save(tmp_path / f'{place}/masks/{n}.png', corner(n % 9, 2))
    told, = [note for note in inspect(tmp_path)[1].notes if note.startswith('trained on too')]
    assert told.endswith(f'the scores flatter; without those: data="{tmp_path}/processed"')
    assert not [note for note in inspect(tmp_path / 'processed')[1].notes if note.startswith('trained on too')]


@pytest.mark.parametrize('tail, is_offered', [('', True), ('/all', True), ('/test', False)])
def test_a_copy_of_all_beside_folders_of_splits_gets_the_line_without_it(tail, is_offered, tmp_path):
    """images/ and masks/ hold all that train/ and test/ hold; the last time, train/ holds images of the test too."""
    for n in range(12):
        for place in ('', 'train/' if n % 3 else 'test/', *['train/'] * (tail == '/test')):
            below = tail * (place == '' and tail == '/all')
            save(tmp_path / f'set/{place}images{below}/{n}.png', scene(n))
            save(tmp_path / f'set/{place}masks{below}/{n}.png', corner(n % 9, 2))
    told, = [note for note in inspect(tmp_path)[1].notes if note.startswith('trained on too')]
    assert told.endswith('without those: images="set/*/images" masks="set/*/masks"') is is_offered
    if is_offered:
        data = inspect(tmp_path, **typed(told.split('without those: ')[1]))[1]
        assert len(data.pairs.images) == 12 and not leaks(data)


def test_a_line_that_brings_other_images_along_is_not_offered_for_the_splits(tmp_path):
    for n in range(12):
        for place in ('', 'train/' if n % 3 else 'test/'):
            save(tmp_path / f'set/{place}images/{n}.png', scene(n))
            save(tmp_path / f'set/{place}masks/{n}.png', corner(n % 9, 2))
        save(tmp_path / f'set/more/images/{n}.png', scene(100 + n))    # which set/*/images means too
        save(tmp_path / f'set/more/masks/{n}.png', corner(n % 9, 2))
    told, = [note for note in inspect(tmp_path)[1].notes if note.startswith('trained on too')]
    assert 'images=' not in told


def test_one_pair_of_two_sizes_does_not_hide_the_folder_that_holds_the_most(tmp_path):
    """image/ and mask/ of 26 beside those of 6 for validation and 4 for a test; one of the 26 has another size, which
    is named once the line is typed."""
    for tail, count in (('', 26), ('_v', 6), ('_t', 4)):
        for n in range(count):
            rgba = np.random.default_rng(n).integers(0, 256, (24, 24, 4))              # of a cut-out: alpha counts
            size = 28 if (tail, n) == ('', 9) else 24
            save(tmp_path / f'image{tail}/{tail}{n:02}.png', scene(n + len(tail) * count, size))
            save(tmp_path / f'mask{tail}/{tail}{n:02}.png', rgba)
    line, = typed_lines(ask(tmp_path))
    assert line == 'images="image" masks="mask"'
    assert 'is 28 x 28 pixels' in str(ask(tmp_path, **typed(line), mask_values='alpha'))


def test_a_folder_that_is_small_beside_others_is_offered_if_all_of_it_pairs(tmp_path):
    """val/ of 4 with its masks, and test/ of 200 without."""
    fill(tmp_path, [*(f'val/{n}.png' for n in range(4)), *(f'test/t{n}.png' for n in range(200))],
         [f'{kind}/{n}.png' for kind in ('annotations', 'labels') for n in range(4)])
    assert {*typed_lines(ask(tmp_path))} == {f'images="val" masks="{kind}"' for kind in ('annotations', 'labels')}


def test_folders_named_after_masks_are_tried_first(tmp_path):
    """Time may not suffice for all."""
    fill(tmp_path, [f'{kind}/{n}.png' for kind in ('a_result', 'b_result', 'scene') for n in range(9)],
         [f'z_labels/{n}.png' for n in range(4)])
    answers = [*train_unet.folder_answers(train_unet.list_files(tmp_path))]
    are_labels = [answer['masks'] == 'z_labels' for answer in answers]
    assert len({*are_labels}) == 2 and are_labels == sorted(are_labels, reverse=True)


def test_folders_that_lie_beside_each_other_are_tried_before_others(tmp_path):
    """Of 272 candidates those of two scenes and a program's labels took all of the time."""
    fill(tmp_path, [f'{where}/{n}.png' for where in ('a/one', 'a/two', 'b/one', 'b/two', 'z/scene') for n in range(9)],
         [f'{where}/labels/{n}.png' for where in ('a', 'z') for n in range(9)])
    answers = [*train_unet.folder_answers(train_unet.list_files(tmp_path))]
    are_near = [os.path.dirname(answer['images']) == os.path.dirname(answer['masks']) for answer in answers
                if answer['masks'].endswith('labels')]
    assert len({*are_near}) == 2 and are_near == sorted(are_near, reverse=True)


@pytest.mark.parametrize('seconds, told', [
    (0, ' found that pair'), (0.25, ' found that pair'), (20, ' found in the time for it (data=FOLDER leaves fewer')])
def test_a_search_that_time_ended_is_told(seconds, told, tmp_path, monkeypatch):
    """It ends by the work of this process: on a busy machine, here of a quarter second a try, no line is lost."""
    fill(tmp_path, [f'{where}/{n**2}{where}.png' for n, where in enumerate('abcdefgh')], [])
    monkeypatch.setattr(time, 'monotonic', itertools.count(0, seconds).__next__)
    assert told in str(ask(tmp_path))


def test_predictions_are_not_offered_as_images(tmp_path):
    for n in range(6):
        save(tmp_path / f'predict_test/left/{n}.png', scene(n, 48))
        save(tmp_path / f'data_left/{n}.png', scene(n + 10, 48))
        for task in ('hand', 'arm'):
            save(tmp_path / f'labels/left_{task}_labels/{n}.png', np.eye(48))
    assert 'predict_test' not in str(ask(tmp_path)).split('type one of these')[1]


def test_images_of_a_kind_that_has_masks_of_its_own_get_no_others(tmp_path):
    """Augment_images/0.png is another picture than images/0.png."""
    for kind, count in (('', 5), ('Augment_', 4)):
        fill(tmp_path, *([f'{kind}{word}/{n}.png' for n in range(count)] for word in ('images', 'masks')))
    text = str(ask(tmp_path))
    assert 'images="Augment_images" masks="Augment_masks"' in text and 'images="images" masks="masks"' in text
    assert 'images="Augment_images" masks="masks"' not in text


def test_a_kind_of_leaves_gets_no_masks_of_another_kind(tmp_path):
    """PlantVillage: color/Tomato/x.JPG and the cut-outs segmented/Tomato/x_final_masked.jpg, numbered by kind."""
    for place, (k, kind), n in itertools.product(('color', 'grayscale', 'segmented'), enumerate('abc'), range(6)):
        name = f'{k * 97 + n * 31:08x}_{3000 + n}' + '_final_masked' * (place == 'segmented')
        photo = scene(10 * k + n, 64)
        save(tmp_path / f'{place}/{kind}_leaf/{name}.png',
             np.where(np.indices((64, 64, 1))[1] < 45 - 15 * k, photo, 0) if place == 'segmented' else photo)
    assert not typed_lines(ask(tmp_path))


def test_images_of_one_set_get_no_masks_of_another(tmp_path):
    """Test/{images,masks} beside TNBC/{Slide,Masks}: the numbers in their names are the same."""
    fill(tmp_path, *([f'Tissue/{kind}/{n}.png' for n in range(5)] for kind in ('images', 'masks')))
    fill(tmp_path, [f'Clinic/Slide/{n}.png' for n in range(8)], [f'Clinic/Masks/{n}.png' for n in range(8)])
    lines = str(ask(tmp_path)).split('type one of these')[1].splitlines()[1:]
    assert lines and all('Tissue' not in line or 'Clinic' not in line for line in lines)


@pytest.mark.parametrize('image', ['{top}/images/{n}.png', 'images/{top}/{n}.png'])
def test_photographs_beside_annotations_that_are_folders_of_both_are_asked_about(tmp_path, image):
    names = [image.format(top=top, n=n) for top in ('photo_studio', 'lab') for n in range(6)]
    for kind in ('images', 'masks', 'instance_masks'):
        fill(tmp_path, [name.replace('images', kind) for name in names], [])
    assert 'could hold the' in str(ask(tmp_path))


# --- masks of one image in several files ----------------------------------------------


def numbered(folder, further, images=(), name='{n}_mask'):
    """Six images with masks; {name of a further mask: its pixels}, further images."""
    for n in range(6):
        save(folder / f'{n}.png', scene(n))
        save(folder / f'{name.format(n=n)}.png', corner(0, 0))
    for stem, mask in further.items():
        save(folder / f'{stem}.png', mask)
    for stem in images:
        save(folder / f'{stem}.png', scene(9))
    return folder


def test_parts_of_other_modes_are_united(tmp_path):
    """Black stored as colour is as black as 0."""
    config, data = inspect(numbered(tmp_path, {'3_mask_1': np.repeat(corner(9, 9)[..., None], 3, 2)}))
    mask = next(os.fsdecode(path) for path in data.pairs.masks if b'3_mask' in path)
    codes = data.coding.encode(train_unet.read_mask(mask, config))
    assert np.array_equal(codes, (corner(0, 0) | corner(9, 9)) > 0) and data.coding.num_classes == 2


def test_palettes_of_several_parts_are_one(tmp_path):
    """Numbers and colours of all parts belong together."""
    colours = [[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]]
    for n in range(9):
        save(tmp_path / f'{n}.png', scene(n))
        whole = corner(0, 0, 1) + corner(0, 9, 2) + corner(9, 0, 3)
        first, second = [(2, 1), (3, 1), (0, 0)][n % 3]
        palette_mask(tmp_path / f'{n}_mask.png', whole if first == 0 else corner(0, 0, first), colours)
        if second:
            palette_mask(tmp_path / f'{n}_mask_1.png', corner(9, 9, second), colours)
    data = inspect(tmp_path)[1]
    assert data.coding.num_classes == 4 and 'palette masks differ' not in str(data.notes)


def test_parts_with_a_palette_lend_no_colours_to_parts_without(tmp_path):
    """A grey 3 beside a red 5 is not red: that other masks show 3 in blue contradicts nothing."""
    red_is_five = [[0, 0, 0], [9, 9, 9], [8, 8, 8], [0, 0, 255], [7, 7, 7], [255, 0, 0]]
    for n in range(8):
        save(tmp_path / f'{n}.png', scene(n))
        palette_mask(tmp_path / f'{n}_mask.png', corner(0, 0, 5 if n % 2 else 3), red_is_five)
        if n % 2:
            save(tmp_path / f'{n}_mask_1.png', corner(9, 9, 3))
    assert 'palette masks differ' not in str(inspect(tmp_path, num_classes=6)[1].notes)


def test_masks_that_are_numbered_from_one_are_united(tmp_path):
    """SegPC-2021: x/106.bmp, y/106_1.bmp and, where it shows two cells, y/106_2.bmp."""
    for n in range(100, 108):
        save(tmp_path / f'x/{n}.bmp', scene(n))
        for part in range(1, 2 + n % 2):
            save(tmp_path / f'y/{n}_{part}.bmp', corner(0, 0) if part == 1 else corner(9, 9))
    lines = typed_lines(ask(tmp_path))
    assert lines[0].split() == ['images="x"', 'masks="y"']
    config, data = inspect(tmp_path, **typed(lines[0]))
    assert len(data.pairs.images) == 8
    assert (train_unet.read_mask(os.fsdecode(data.pairs.masks[1]), config) > 0).sum() == 128
    save(tmp_path / 'x/101_2.bmp', scene(9))                           # whose mask y/101_2.bmp would be
    assert 'masks united' not in str(inspect(tmp_path, **typed(lines[0]), skip_unpaired=True)[1].pairs.rule)


def test_a_stray_mask_does_not_keep_others_from_being_united(tmp_path):
    folder = numbered(tmp_path, {'3_mask_1': corner(9, 9), 'y_mask': corner(0, 0)})
    assert 'y_mask.png' in str(ask(folder)) and '3_mask_1' not in str(ask(folder))
    data = inspect(folder, skip_unpaired=True)[1]
    assert sum(train_unet.UNITED.encode() in path for path in data.pairs.masks) == 1


@pytest.mark.parametrize('further, images', [
    ({'3_mask_1': corner(1, 1)}, ()),                                  # two people drew one thing
    ({'3_mask_1': 255 - corner(9, 9)}, ()),                            # inverted, or ignored around
    ({'3_mask_1': corner(9, 9)}, ['3_1']),                             # of an image of its own
])
def test_masks_that_may_mean_something_else_are_not_united(tmp_path, further, images):
    error = str(ask(numbered(tmp_path, further, images)))
    assert '3_mask_1.png' in error and 'masks united' not in error


def test_masks_of_other_frames_are_not_united(tmp_path):
    """P03_mask_9 is the mask of P03_img_9, which is gone."""
    for n in range(6):
        save(tmp_path / f'images/P{n}_img_{n}.png', scene(n))
        save(tmp_path / f'masks/P{n}_mask_{n}.png', corner(0, 0))
    save(tmp_path / 'masks/P3_mask_9.png', corner(9, 9))
    assert 'P3_mask_9.png' in str(ask(tmp_path))
    assert not any(train_unet.UNITED.encode() in path for path in
                   inspect(tmp_path, skip_unpaired=True)[1].pairs.masks)


def test_masks_of_other_patients_are_not_united(tmp_path):
    """Numbers begin anew in each folder, and one image is missing."""
    for patient, images, masks in (('A', '58', '58'), ('B', '79', '579'), ('C', '12', '12')):
        for n in images:
            save(tmp_path / f'{patient}/images/{n}.png', scene(int(n)))
        for n in masks:
            save(tmp_path / f'{patient}/masks/{n}.png', corner(0, 0))
    assert 'united' not in str(ask(tmp_path))
    data = inspect(tmp_path, images='*/images', masks='*/masks', skip_unpaired=True)[1]
    assert partners(data, tmp_path) == {f'{p}/images/{n}.png': f'{p}/masks/{n}.png'
                                        for p, images in (('A', '58'), ('B', '79'), ('C', '12')) for n in images}


@pytest.mark.parametrize('size', [24, 12])
def test_second_masks_that_are_no_parts_are_skipped_when_asked(tmp_path, size):
    """Of another annotator, or of another size."""
    folder = numbered(tmp_path, {f'{n}_mask_2': corner(1, 1, size=size) for n in range(6)})
    data = inspect(folder, skip_unpaired=True)[1]
    assert partners(data, folder) == {f'{n}.png': f'{n}_mask.png' for n in range(6)}


def test_halves_at_the_top_are_offered_together_classes_apart(tmp_path):
    for n in range(6):
        for folder, mask in (('CXR', scene(n)), ('leftMask', corner(0, 0)), ('rightMask', corner(9, 9))):
            save(tmp_path / f'lungs/{folder}/{n}.png', mask)
        for folder, mask in (('images', scene(n)), ('masks/road', corner(0, 0)), ('masks/car', corner(9, 9)),
                             ('masks/tree', corner(0, 16))):
            save(tmp_path / f'town/{folder}/{n}.png', mask)
    first = [next(line for line in ask(tmp_path / name).problems if line.startswith('    ')).strip()
             for name in ('lungs', 'town')]
    assert first == ['images="CXR" masks="*Mask"   (6 pairs, masks united: one class)',
                     'images="images" masks="masks/car"   (6 pairs)']


def test_objects_and_folders_may_be_called_human(tmp_path):
    for n in range(6):
        save(tmp_path / f'a/images/s{n}.png', scene(n))
        for kind, mask in (('human', corner(0, 0)), ('dog', corner(9, 9))):
            save(tmp_path / f'a/masks/s{n}/{kind}.png', mask)
        save(tmp_path / f'b/imgs/{n}.png', scene(n))
        if n:
            save(tmp_path / f'b/human/{n}.png', corner(0, 0))
    assert 'its masks united' in inspect(tmp_path / 'a')[1].pairs.rule
    assert 'images="imgs" masks="human" skip_unpaired=True' in str(ask(tmp_path / 'b'))


def test_folders_of_objects_by_a_star_are_those_of_their_images(tmp_path):
    for n in range(3):
        save(tmp_path / f'images/im{n}.png', scene(n))
        for k in range(3):
            save(tmp_path / f'masks/im{n}/{k}.png', corner(8 * k, 8 * n))
    data = inspect(tmp_path, images='images', masks='masks/*')[1]
    assert partners(data, tmp_path) == {f'images/im{n}.png': f'masks/im{n}' for n in range(3)}


@pytest.mark.parametrize('images, masks, stem', [('img', 'lab/*', '{film}/{n}'), ('img*', 'lab*', '{film}/{n}'),
                                                 ('*/img', '*/lab', '{n}')])
def test_a_star_unites_nothing_where_images_lie_in_such_folders_too(tmp_path, images, masks, stem):
    """Frames have the same numbers in each film, and one image is gone."""
    place = {'img': 'img/{film}/{n}', 'img*': 'img{film}/{n}', '*/img': '{film}/img/{n}'}[images]
    for film in 'abc':
        for n in range(4):
            name = place.format(film=film, n=n)
            save(tmp_path / f'{name}.png', scene(n)) if (film, n) != ('a', 1) else None
            save(tmp_path / f'{name.replace("img", "lab")}.png', corner(0, 8 * 'abc'.index(film)))
    data = inspect(tmp_path, images=images, masks=masks, skip_unpaired=True)[1]
    pairs = partners(data, tmp_path)
    assert len(pairs) == 11 and all(mask == image.replace('img', 'lab') for image, mask in pairs.items())


@pytest.mark.parametrize('of_images, of_masks', [('img_*', 'mask_*'), ('im*', 'mm/*Mask')])
def test_a_star_on_both_sides_unites_nothing(tmp_path, of_images, of_masks):
    """mask_l and mask_r may be of two people."""
    for n in range(6):
        save(tmp_path / f'img_x/{n}.png', scene(n))
        for side, mask in (('l', corner(0, 0)), ('r', corner(9, 9))):
            save(tmp_path / of_masks.replace('*', side) / f'{n}.png', mask)
    assert ask(tmp_path, images=of_images, masks=of_masks).title == 'images and masks do not pair'


# --- lists ----------------------------------------------------------------------------


def test_lists_whose_columns_have_other_words_are_read(tmp_path):
    for n in range(4):
        save(tmp_path / f'{n}.jpg', scene(n))
        save(tmp_path / f'{n}.png', np.eye(24))
    (tmp_path / 'list.csv').write_text('image_path,Label,split\n' + ''.join(
        f'{n}.jpg,{n}.png,{"val" if n == 3 else "train"}\n' for n in range(4)))
    assert names_of(inspect(tmp_path / 'list.csv')[1], 'val') == {'3'}
    (tmp_path / 'list.csv').write_text('xrays,masks\n' + ''.join(f'{n}.jpg,{n}.png\n' for n in range(4)))
    assert len(inspect(tmp_path / 'list.csv')[1].pairs.images) == 4


@pytest.mark.parametrize('header', ['image_path,depth_image_path,mask_path', 'image_path,mask_path,instance_mask_path',
                                    'image_path,mask_path,label'])
def test_a_header_of_several_columns_for_one_role_is_refused(tmp_path, header):
    (tmp_path / 'list.csv').write_text(header + '\n0.png,1.png,2.png\n')
    assert f'its first line is {header}' in str(ask(tmp_path / 'list.csv'))


def test_lists_of_films_stand_for_their_frames(tmp_path):
    """DAVIS: ImageSets/2017/train.txt names the folders."""
    for film in 'abcd':
        for n in range(5):
            save(tmp_path / f'JPEGImages/480p/{film}/{n:05}.png', scene(n))
            save(tmp_path / f'Annotations/480p/{film}/{n:05}.png', np.eye(24))
    (tmp_path / 'ImageSets/2017').mkdir(parents=True)
    (tmp_path / 'ImageSets/2017/train.txt').write_text('a\nb\nc\n')
    (tmp_path / 'ImageSets/2017/val.txt').write_text('d\n')
    data = inspect(tmp_path)[1]
    held_out = {path.split(b'/')[-2] for path in data.pairs.images[data.pairs.rows('val')]}
    assert held_out == {b'd'} and len(data.pairs.rows('val')) == 5


@pytest.mark.parametrize('image', ['images/{film}/{film}_{n}', '{film}/images/{n}', 'x/{film}/cam/{n}'])
def test_lists_may_name_folders_anywhere(tmp_path, image):
    for film in 'abcd':
        for n in range(5):
            name = image.format(film=f'film{film}', n=n)
            save(tmp_path / f'{name}.jpg', scene(n))
            mask = name.replace('images', 'masks')
            save(tmp_path / f'{mask + "_mask" * (mask == name)}.png', np.eye(24))
    (tmp_path / 'train.txt').write_text('filma\nfilmb\nfilmc\n')
    (tmp_path / 'val.txt').write_text('filmd\n')
    data = inspect(tmp_path)[1]
    assert {b'filmd' in path for path in data.pairs.images[data.pairs.rows('val')]} == {True}
    assert len(data.pairs.rows('val')) == 5


def test_lists_of_all_images_count_before_folders_that_name_the_split_of_some(tmp_path):
    """DeepFish: valid/ are the images with fish, empty/ those without; train.csv, val.csv and test.csv list both."""
    names = [f'{"valid" if n % 3 else "empty"}/{n}' for n in range(12)]
    fill(tmp_path, *([f'{kind}/{name}.png' for name in names] for kind in ('images', 'masks')))
    for split, part in (('train', names[:6]), ('val', names[6:9]), ('test', names[9:])):
        (tmp_path / f'{split}.csv').write_text('ID,labels\n' + ''.join(f'{name},1\n' for name in part))
    assert split_sizes(inspect(tmp_path)[1]) == [6, 3, 3]


def test_lists_may_end_in_lst_and_name_the_masks_too(tmp_path):
    """RELLIS-3D, and what HRNet and its kin read: train.lst with a line `image mask` for each pair."""
    names = [f'{film:05}/{{}}/frame{n:06}' for film in range(3) for n in range(4)]
    fill(tmp_path, *([f'{name.format(kind)}.png' for name in names] for kind in ('image', 'label')))
    for split, part in (('train', names[:6]), ('val', names[6:9]), ('test', names[9:])):
        lines = [f'{name.format("image")}.png {name.format("label")}.png' for name in part]
        (tmp_path / f'{split}.lst').write_text('\n'.join(lines))
    assert split_sizes(inspect(tmp_path)[1]) == [6, 3, 3]


@pytest.mark.parametrize('image, train, val, held_out', [
    ('{n}', '0 1 2 3 4 5 6'.split(), ['7', '', ''], '7'),              # a blank line
    ('{k}/{n}', '0 1 4 5 6'.split(), '2 3 7'.split(), '237'),          # folders with the numbers of images
])
def test_lists_of_images_count_before_lists_of_folders(tmp_path, image, train, val, held_out):
    for n in range(8):
        save(tmp_path / f'images/{image.format(n=n, k=n % 4)}.png', scene(n))
        save(tmp_path / f'masks/{image.format(n=n, k=n % 4)}.png', np.eye(24))
    (tmp_path / 'train.txt').write_text('\n'.join(train))
    (tmp_path / 'val.txt').write_text('\n'.join(val))
    assert names_of(inspect(tmp_path)[1], 'val') == {*held_out}


# --- groups of images -----------------------------------------------------------------


def test_frames_of_a_few_films_are_asked_about(tmp_path):
    """Vocal folds of patient1/seq1 to patient2/seq8."""
    films = [f'patient{n}/seq{m}' for n in (1, 2) for m in (1, 2, 3)]
    fill(tmp_path, *([f'{kind}/{film}/{n}.png' for film in films for n in range(4)] for kind in ('img', 'annot')))
    note, = [note for note in inspect(tmp_path)[1].notes if 'group_pattern' in note]
    config, data = inspect(tmp_path, **typed(note.split(' type ')[1]))
    sides = [{os.path.dirname(os.fsdecode(data.pairs.images[row])) for row in data.pairs.rows(split)}
             for split in ('train', 'val')]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 6 and 'group_pattern' not in str(data.notes)


@pytest.mark.parametrize('names', [
    [f'{car:04x}_{n:02}' for car in range(4) for n in range(8)],       # Carvana's views of a car
    [f'slide{car} [x={n},y=0]' for car in range(4) for n in range(8)],         # QuPath's tiles
    [f'{eye}_{kind}' for eye in range(21, 31) for kind in ('orig', 'aug_0', 'aug_1', 'aug_2')],
    [f'Image_{child:02}{eye}' for child in range(1, 15) for eye in 'LR'],      # CHASE_DB1
])
def test_views_of_a_few_things_are_asked_about(tmp_path, names):
    for n, stem in enumerate(names):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    line, = [note for note in inspect(tmp_path)[1].notes if ' type group_pattern=' in note]
    data = inspect(tmp_path, **typed(line.split(' type ')[1]))[1]
    train, val = ({re.match('Image_..|[^_ ]*', x)[0] for x in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)


@pytest.mark.parametrize('name, changes', [
    ('crack_{:03}{}', ('', '_flip', '_rot90', '_bright')), ('aug_data/{:05}{}', ('', '_0', '_1', '_2')),
    ('{1}{0:03}', ('', 'flip_', 'rot90_', 'bright_')), ('{1}{0}_x', ('', 'flip_', 'rot90_', 'bright_')),
    ('{1}{0}-149{0}-001', ('', 'flipped_', 'rotated_90_', 'mirrored_')), ('{1}{0}_3', ('', 'flip_', 'rot90_', 'blur_')),
    ('{1}{0}_3', ('rot90_', 'flip_')), ('a{0}b3{1}', ('', '_hflip', '_rot_90')),
    ('{1}/{0:03}', ('orig', 'hflip', 'rot90', 'bright')), ('{1}_{0:03}', ('rot0', 'rot90', 'rot180', 'rot270'))])
def test_images_that_somebody_augmented_are_kept_together_as_told(tmp_path, name, changes):
    """Each of ten images four times."""
    numbers = {name.format(number, change): number for number in range(10, 20) for change in changes}
    for n, stem in enumerate(numbers):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    line, = [note for note in inspect(tmp_path)[1].notes if ' type group_pattern=' in note]
    assert 'augmented' in line
    data = inspect(tmp_path, **typed(line.split(' type ')[1]))[1]
    numbers = {os.path.basename(stem): number for stem, number in numbers.items()}
    train, val = ({numbers[stem] for stem in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)


def test_augmented_images_whose_names_tell_no_more_are_told_too(tmp_path):
    for n in range(10):
        save(tmp_path / f'images/{"augmented " * (n % 2)}{"abcdefghij"[n]}.png', scene(n))
        save(tmp_path / f'masks/{"augmented " * (n % 2)}{"abcdefghij"[n]}.png', np.eye(24))
    note, = [note for note in inspect(tmp_path)[1].notes if 'augmented' in note]
    assert note.endswith('such as augmented b, stay on one side of the split a group_pattern is needed')


def test_the_number_before_the_word_for_augmentation_names_the_image(tmp_path):
    """1_aug_0 is the first of ten copies of image 1: there are more copies of each than images."""
    for n, stem in enumerate(f'{number}_aug_{copy}' for number in range(1, 8) for copy in range(10)):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    line, = [note for note in inspect(tmp_path)[1].notes if 'augmented' in note]
    data = inspect(tmp_path, **typed(line.split(' type ')[1]))[1]
    train, val = ({stem[0] for stem in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)


def test_images_of_which_some_are_augmented_are_kept_together_as_told(tmp_path):
    """LS_train_00000192 with _enhanced1 and _enhanced2, others alone."""
    stems = [f'LS_{n:08}{tail}' for n in range(20) for tail in ('', '_enhanced1', '_enhanced2')[:3 if n % 4 else 1]]
    for n, stem in enumerate(stems):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    line, = [note for note in inspect(tmp_path)[1].notes if 'augmented' in note]
    data = inspect(tmp_path, **typed(line.split(' type ')[1]))[1]
    train, val = ({stem[:11] for stem in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)


def test_folders_that_tell_the_split_are_not_asked_about_as_patients(tmp_path):
    fill(tmp_path, *([f'{top}/{kind}{top[-1]}/{top[:2]}{n}.png' for top in ('Train 1', 'Test 2') for n in range(6)]
                     for kind in ('images', 'masks')))
    data = inspect(tmp_path, images='*/images*', masks='*/masks*')[1]
    assert [*np.bincount(data.pairs.splits)] == [5, 1, 6] and 'patient' not in str(data.notes)


def test_numbers_that_training_and_test_share_are_no_groups(tmp_path):
    fill(tmp_path, *([f'{split}/{kind}/{n}.png' for split in ('train', 'test') for n in range(9)]
                     for kind in ('images', 'masks')))
    assert 'group_pattern' not in str(inspect(tmp_path)[1].notes)


def test_arrays_that_hold_no_picture_are_offered_by_no_line(tmp_path):
    """PanNuke: stacks of images and of masks, and the tissue of each in an array of text."""
    for fold in (1, 2, 3):
        save(tmp_path / f'Fold {fold}/images/fold{fold}/images.npy', np.zeros((5, 8, 8, 3)) + fold)
        save(tmp_path / f'Fold {fold}/images/fold{fold}/types.npy', np.array(['Breast', 'Colon', 'Liver']))
        save(tmp_path / f'Fold {fold}/masks/fold{fold}/masks.npy', np.zeros((5, 8, 8, 6)))
    told = str(ask(tmp_path))
    assert 'tried on your files' not in told and 'volumes and stacks are to be drawn first' in told


def test_pictures_of_the_same_names_elsewhere_are_no_tiles_of_a_list(tmp_path):
    """No text file is there: test_0.png begins with its split, and results/ holds what was made of it."""
    fill(tmp_path, [f'{folder}/test_{n}.png' for folder in ('images', 'results') for n in range(9)],
         [f'masks/test_{n}.png' for n in range(9)])
    assert not [note for note in inspect(tmp_path)[1].notes if 'text files' in note]


def test_tiles_that_the_lists_name_are_pointed_at(tmp_path):
    """LandCover.ai after its split.py: large photographs in images/ and masks/, and their tiles in output/."""
    fill(tmp_path, [f'images/map{n}.png' for n in range(5)], [f'masks/map{n}.png' for n in range(5)])
    tiles = [f'map{n}_{tile}' for n in range(5) for tile in range(4)]
    fill(tmp_path, [f'output/{tile}.jpg' for tile in tiles], [f'output/{tile}_m.png' for tile in tiles])
    for split, part in (('train', tiles[:12]), ('val', tiles[12:16]), ('test', tiles[16:])):
        (tmp_path / f'{split}.txt').write_text('\n'.join(part))
    note, = [note for note in inspect(tmp_path)[1].notes if ' type images=' in note]
    words = typed(note.split(' type ')[1])
    words |= typed(offered(ask(tmp_path, **words), 'mask_pattern='))
    _, data = inspect(tmp_path, **words)
    assert [len(names_of(data, split)) for split in ('train', 'val', 'test')] == [12, 4, 4]
    assert not any('not like' in note for note in data.notes)


@pytest.mark.parametrize('named', [True, False])
def test_versions_that_roboflow_made_of_a_photograph_are_told(tmp_path, named):
    names = [f'{n}_jpg.rf.{version:04x}' for n in range(10) for version in range(2)]
    split_of = lambda at: ('train/' if at % 2 else 'valid/') if named else ''
    fill(tmp_path, *([f'{split_of(at)}{kind}/{name}.png' for at, name in enumerate(names)]
                     for kind in ('images', 'masks')))
    note, = [note for note in inspect(tmp_path)[1].notes if '[.]rf' in note]
    if named:                                                          # the folders stay as they are
        assert note == '10 of 10 groups of images ((.*)[.]rf[.]) are on several sides of the split: scores flatter'
        return
    data = inspect(tmp_path, **typed(note.split(' type ')[1]))[1]
    sides = [{name.split('.rf.')[0] for name in names_of(data, split)} for split in ('train', 'val')]
    assert not sides[0] & sides[1] and not [note for note in data.notes if 'flatter' in note]
    fill(tmp_path, *([f'{kind}/plain{n}.png' for n in range(4)] for kind in ('images', 'masks')))       # among others
    note, = [note for note in inspect(tmp_path)[1].notes if 'flatter' in note]
    assert not [note for note in inspect(tmp_path, **typed(note.split(' type ')[1]))[1].notes if 'flatter' in note]


@pytest.mark.parametrize('names', [
    [f'{n:02}_a' for n in range(32)], [f'x_{n}' for n in range(32)],   # one each, one for all
    [f'{kind}_{n}' for kind in ('cat', 'dog') for n in range(16)],     # kinds
    [f'f{1 + (n == 0)}_{n}' for n in range(32)], [f'f{1 + (n < 3)}_{n}' for n in range(32)],       # most are of one
])
def test_names_of_other_kinds_are_no_groups(tmp_path, names):
    for n, stem in enumerate(names):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    assert 'begin in groups' not in str(inspect(tmp_path)[1].notes)


def test_two_folders_of_few_images_beside_many_in_none_are_no_groups(tmp_path):
    names = [f'{folder}{n}.png' for folder, n in itertools.product(('', 'a/', 'b/'), range(12))]
    fill(tmp_path, *([f'{kind}/{name}' for name in names] for kind in ('images', 'masks')))
    assert not [note for note in inspect(tmp_path)[1].notes if 'the images lie in' in note]


# --- copies ---------------------------------------------------------------------------


def leaks(data):
    return [note for note in data.notes if 'scores flatter' in note]


def test_copies_under_other_names_are_told(tmp_path):
    """A copy of DRIVE: images/DRIVE_01.tif is test/images/01_test.tif."""
    for split, prefix, numbers in (('train', 'x', range(6)), ('test', 'y', range(4, 8))):
        for n in numbers:
            save(tmp_path / f'{split}/images/{prefix}{n}.png', scene(n))
            save(tmp_path / f'{split}/masks/{prefix}{n}.png', np.eye(24))
    data = inspect(tmp_path, val_fraction=0)[1]
    assert [note.split(',')[0] for note in leaks(data)] == ['trained on too: 2 images of validation or test']


def test_copies_of_training_images_do_not_validate(tmp_path):
    """source/ holds all, train/ copies of most; black slices, alike in all sets, stay where chance put them."""
    for n in range(20):
        for folder in ('source', 'train')[:1 + (n < 16)]:
            save(tmp_path / f'{folder}/image/{n}.png', scene(n))
            save(tmp_path / f'{folder}/mask/{n}.png', np.eye(24))
    data = inspect(tmp_path, val_fraction=0.1)[1]
    held_out = names_of(data, 'val')
    assert len(held_out) == 2 and held_out <= {f'{n}' for n in range(16, 20)} and not leaks(data)
    told, = [note for note in data.notes if 'with copies, such as' in note]
    assert told.startswith('16 images') and told.endswith('these are on one side')
    black = tmp_path / 'black'
    for n in range(10):
        save(black / f'images/{n}.png', scene(n) if n < 5 else np.zeros((24, 24, 3)))
        save(black / f'masks/{n}.png', np.eye(24) * (n < 5))
    data = inspect(black, val_fraction=0.5)[1]
    assert len(names_of(data, 'val')) == 5 and not leaks(data) and 'with copies' not in str(data.notes)


@pytest.mark.parametrize('times', [2, 5])
def test_copies_leave_validation_its_share(tmp_path, times):
    for n in range(12):
        for k in range(times):
            save(tmp_path / f'images/{n}_{k}.png', scene(n))
            save(tmp_path / f'masks/{n}_{k}.png', np.eye(24))
    for seed in range(3):
        data = inspect(tmp_path, seed=seed)[1]
        held_out = names_of(data, 'val')
        assert abs(len(held_out) - 12 * times * 0.2) <= times and not leaks(data)
        assert {name.split('_')[0] for name in held_out}.isdisjoint(
            {name.split('_')[0] for name in names_of(data, 'train')})
    # who types a group_pattern has said what belongs together
    data = inspect(tmp_path, group_pattern=r'_(\d)')[1]
    assert len({name.split('_')[1] for name in names_of(data, 'val')}) == 1 and leaks(data)


def test_copies_whose_pixels_break_are_told_too(tmp_path):
    """The first look compares their bytes; what of their pixels is broken is told by who decodes them."""
    for n in range(6):
        for task, mask in (('a', np.eye(24)), ('b', np.eye(24)[::-1])):
            save(tmp_path / f'{task}/images/{task}{n}.png', scene(n))
            save(tmp_path / f'{task}/masks/{task}{n}.png', mask * (np.arange(24) > 9 if task == 'b' else 1))
            path = tmp_path / f'{task}/images/{task}{n}.png'
            path.write_bytes(path.read_bytes()[:-60])
    notes = inspect(tmp_path)[1].notes
    assert any('with copies, such as' in note for note in notes)
    assert any('mask files that differ' in note for note in notes)     # the bytes tell that


def test_others_of_its_mark_or_name_do_not_hide_a_copy(tmp_path):
    """Two patients whose slices have equal names and empty masks; uncompressed pictures, black but for their rims."""
    def slice_of(patient, n):
        picture = np.zeros((128, 128))
        picture[:16] = picture[-16:] = scene(10 * patient + n, 128)[:16, :, 0]
        return picture

    for split, patient, kind in (('train', 1, 'bmp'), ('train', 2, 'bmp'), ('val', 1, 'png'), ('val', 3, 'bmp')):
        for n in range(4):
            same = patient == 1 and n == 3                             # also in validation, byte for byte
            suffix = 'bmp' if same else kind
            save(tmp_path / f'{split}/images/p{patient}/{n}.{suffix}', slice_of(patient, n))
            save(tmp_path / f'{split}/masks/p{patient}/{n}.png', np.eye(128) * (patient == 3 or same))
    copies, = leaks(inspect(tmp_path, num_classes=2)[1])
    assert copies == (f'trained on too: 1 image of validation or test, such as {tmp_path}/val/images/p1/3.bmp as '
                      f'{tmp_path}/train/images/p1/3.bmp: the scores flatter')


def test_black_slices_and_different_scenes_in_one_field_of_view_are_no_leaks(tmp_path):
    y, x = np.mgrid[:64, :64]
    field = 150 * ((y - 32) ** 2 + (x - 32) ** 2 < 28 ** 2)
    for n, (split, name) in enumerate(itertools.product(('train', 'val'), range(4))):
        texture = np.random.default_rng(n).normal(0, 8, (64, 64)) * (field > 0)
        save(tmp_path / f'{split}/images/{name}.png', field + texture)
        save(tmp_path / f'{split}/images/black{name}.png', np.zeros((64, 64)))
        for kind in ('', 'black'):
            save(tmp_path / f'{split}/masks/{kind}{name}.png', np.zeros((64, 64)))
    save(tmp_path / 'train/images/x.png', scene(1, 64))
    save(tmp_path / 'train/masks/x.png', np.eye(64))
    assert not leaks(inspect(tmp_path)[1])


def test_pictures_that_are_black_in_the_same_places_are_no_copies(tmp_path):
    """Uncompressed, of one size, and alike where the mark of a file is taken."""
    for n in range(12):
        picture = np.zeros((200, 200, 3), np.uint8)
        shown = slice(2, 12) if n < 8 else slice(None)
        picture[shown] = np.random.default_rng(n).integers(0, 256, picture[shown].shape)
        save(tmp_path / f'images/{n}.bmp', picture)
        save(tmp_path / f'masks/{n}.png', np.eye(200))
    notes = inspect(tmp_path)[1].notes
    assert 'with copies' not in str(notes) and not [note for note in notes if 'flatter' in note]


def test_masks_of_two_tasks_are_told_though_all_copies_are_trained_on(tmp_path):
    for n in range(10):
        for task, mask in (('a', np.eye(24)), ('b', np.eye(24)[::-1] * (np.arange(24) > 9))):
            save(tmp_path / f'{task}/images/{task}{n}.png', scene(n))
            save(tmp_path / f'{task}/masks/{task}{n}.png', mask)
    notes = inspect(tmp_path, val_fraction=0.0)[1].notes + inspect(tmp_path)[1].notes
    assert sum('one and the same image has mask files that differ' in note for note in notes) == 2


def test_masks_that_are_copies_of_their_images_are_refused_by_name(tmp_path):
    """A sky set whose masks were never drawn."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n}.png', scene(n))
    text = str(ask(tmp_path))
    assert text.count(': is a copy of its image, no mask') == 4 and f'{tmp_path}/masks/3.png' in text


@pytest.mark.parametrize('pixels, is_copy', [(np.zeros((24, 24)), False), (255 * np.eye(24), False),
                                             (scene(3), True)], ids=['black', 'a binary picture', 'a photograph'])
def test_a_black_slice_and_its_empty_mask_may_be_one_and_the_same_file(tmp_path, pixels, is_copy):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(24))
    for kind in ('images', 'masks'):
        save(tmp_path / f'{kind}/same.png', pixels)
    if is_copy:
        assert 'same.png: is a copy of its image' in str(ask(tmp_path))
    else:
        assert len(inspect(tmp_path)[1].pairs.images) == 5


# --- values of masks ------------------------------------------------------------------


def test_evenly_spaced_values_are_no_specks(tmp_path):
    """Teeth: 85 and 170 are rare, and classes."""
    masks = [np.repeat([0, 255], [40, 24]).repeat(64).reshape(64, 64) for _ in range(4)]
    masks[0][0, 0], masks[1][0, 0] = 85, 170
    text = str(ask(with_masks(tmp_path, masks)))
    assert 'specks' not in text and '"{0: 0, 85: 1, 170: 2, 255: 3}"' in text


def test_specks_get_a_line_that_ignores_them(tmp_path):
    """White blood cells: 0, 128 and 255, and a few stray pixels of eleven other values."""
    masks = [np.repeat([0, 128, 255], [30, 20, 14]).repeat(64).reshape(64, 64) for _ in range(6)]
    for value in range(11):
        masks[0][value, value] = 3 + 20 * value
    line = offered(ask(with_masks(tmp_path, masks)), 'mask_values="{')
    data = inspect(tmp_path, **typed(line))[1]
    assert data.coding.num_classes == 3
    assert {name: data.coding.table[name] for name in (0, 128, 255, 3, 203)} == {0: 0, 128: 1, 255: 2, 3: 255, 203: 255}


def test_a_line_that_ignores_specks_ignores_255_too(tmp_path):
    masks = [np.repeat([0, 1, 2, 255], [30, 20, 10, 4]).repeat(64).reshape(64, 64) for _ in range(6)]
    masks[0][0, 0] = 7
    line = next(line for line in ask(with_masks(tmp_path, masks)).problems if 'specks' in line)
    assert typed(line.split(' type ')[1]) == {'mask_values': {0: 0, 1: 1, 2: 2, 7: 255, 255: 255}}


def test_values_between_black_and_white_that_few_pixels_have_are_asked_about_last(tmp_path):
    """Two pixels of 100 in one of many masks of 0 and 255."""
    masks = [np.repeat([0, 255], [40, 24]).repeat(64).reshape(64, 64) for _ in range(8)]
    masks[0][0, :2] = 100
    lines = [line for line in ask(with_masks(tmp_path, masks)).problems if ' type ' in line]
    assert lines[0] == 'if bright is foreground type mask_values=">127"'


def test_rare_classes_are_offered_before_a_threshold(tmp_path):
    masks = [np.repeat([0, 255], [40, 24]).repeat(64).reshape(64, 64) for _ in range(8)]
    masks[0][0, :2] = 1
    assert typed(offered(ask(with_masks(tmp_path, masks)), 'mask_values=')) != {'mask_values': '>127'}


def test_no_threshold_is_offered_that_cuts_a_class_in_two(tmp_path):
    """Myelin is 127 in most masks, 128 in some."""
    masks = [np.repeat([0, 127 + n // 4, 255], [30, 20, 14]).repeat(64).reshape(64, 64) for n in range(5)]
    assert '">127"' not in str(ask(with_masks(tmp_path, masks)))
    soft = [np.repeat([0, 60, 200, 255], [30, 2, 2, 30]).repeat(64).reshape(64, 64) for _ in range(5)]
    assert '">127"' in str(ask(with_masks(tmp_path / 'soft', soft)))


def test_soft_edges_get_a_threshold_among_the_lines(tmp_path):
    """Enlarged masks: a fifth of the pixels lies between, some of it in the middle."""
    masks = [np.repeat([0, 64, 128, 191, 255], [30, 4, 2, 4, 24]).repeat(64).reshape(64, 64) for _ in range(6)]
    assert '">127"' in str(ask(with_masks(tmp_path, masks)))


def test_masks_of_a_single_colour_are_asked_about(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n}.png', np.full((24, 24, 3), (18, 52, 86)))
    error = ask(tmp_path)
    assert error.title == 'the mask values are not clear' and "'#123456' (100.00%, 4 images)" in str(error)
    assert '255 after a colon means ignored' in str(error)


def test_colours_may_be_typed_in_capitals(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        palette = [[0, 0, 0], [255, 0, 0], *[[9, 9, 9]] * 253, [255, 255, 255]]
        palette_mask(tmp_path / f'masks/{n}.png', corner(0, 0, 1) + corner(9, 9), palette)
    config, data = inspect(tmp_path, mask_values={'#FF0000': 1, '#FFFFFF': 2})
    mask = data.coding.encode(train_unet.read_mask(str(tmp_path / 'masks/0.png'), config))
    assert np.array_equal(mask, corner(0, 0, 1) + corner(9, 9, 2))


def test_colours_around_two_named_ones_take_no_memory_of_their_square(tmp_path):
    """20,000 colours wanted 10 GiB."""
    draw = np.random.default_rng(0)
    for n in range(3):
        clean = np.where(np.arange(80) < 40, 20, 235).repeat(80).reshape(80, 80, 1)
        save(tmp_path / f'images/{n}.png', draw.integers(0, 256, (80, 80, 3)))
        save(tmp_path / f'masks/{n}.png', clean + draw.integers(-20, 21, (80, 80, 3)))
    tracemalloc.start()
    data = inspect(tmp_path, mask_values={'#000000': 0, '#ffffff': 1})[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data.values) > 10_000 and peak < 200e6


def test_classes_that_no_mask_has_are_told(tmp_path):
    for n in range(6):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n}.png', np.eye(24) + 2 * np.eye(24)[::-1])
    notes = inspect(tmp_path, num_classes=6)[1].notes
    assert any(note.startswith('no training mask has class 3, 4, 5') for note in notes)


def test_what_pickled_arrays_are_is_said(tmp_path):
    """cellpose's _seg.npy."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        (tmp_path / 'masks').mkdir(exist_ok=True)
        np.save(tmp_path / f'masks/{n}.npy', {'masks': np.eye(24)}, allow_pickle=True)
    assert 'holds Python objects, which are not read; save its pixels as .npy' in str(ask(tmp_path))


def test_masks_whose_alpha_is_nearly_opaque_are_read(tmp_path):
    draw, masks = np.random.default_rng(0), []
    for _ in range(4):
        picture = np.zeros((64, 64, 4), np.uint8)
        picture[:20, :, :3] = draw.integers(200, 256, (20, 64, 3))
        picture[..., 3] = draw.integers(217, 256, (64, 64))
        masks.append(PIL.Image.fromarray(picture))
    data = inspect(with_masks(tmp_path, masks), mask_values='>127')[1]
    assert data.shares.tolist() == pytest.approx([44 / 64, 20 / 64])


def test_shapes_in_the_alpha_channel_are_read_when_asked(tmp_path):
    """Photographs cut out: the refusal says what to type."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'masks/{n}.png', np.dstack([scene(n) // 200 * 0 + 9, corner(n, 0)]))
    error = ask(tmp_path)
    assert 'its shape is in the alpha channel; type mask_values=alpha' in str(error)
    config, data = inspect(tmp_path, mask_values='alpha')
    mask = data.coding.encode(train_unet.read_mask(str(tmp_path / 'masks/2.png'), config))
    assert np.array_equal(mask, corner(2, 0) > 0)
    save(tmp_path / 'masks/3.png', corner(0, 0))
    assert 'has no alpha channel' in str(ask(tmp_path, mask_values='alpha'))


# --- inverted masks -------------------------------------------------------------------


@pytest.mark.parametrize('share, asked', [(0.87, True), (0.8, False)])
def test_masks_of_paper_are_suspected_to_be_inverted(tmp_path, share, asked):
    mask = np.full(64 * 64, 255)
    mask[int(share * mask.size):] = 0
    notes = inspect(with_masks(tmp_path, [mask.reshape(64, 64)] * 4))[1].notes
    line = [note for note in notes if 'inverted' in note]
    assert len(line) == asked and all('mask_values="{0: 1, 255: 0}"' in note for note in line)


def test_inverted_masks_of_half_foreground_are_suspected_by_their_edges(tmp_path):
    """Cells that are black on white, in masks of which half is white; fields that go beyond all edges are none."""
    inside = np.full((64, 64), 255)
    inside[10:54, 10:54] = 0
    fields = (np.add.outer(np.arange(64) // 3, np.arange(64) // 3) % 6 < 5) * 255
    top = np.full((64, 64), 255)                                       # what lies at one edge
    top[:32, 2:62] = 0
    small = np.full((64, 64), 255)                                     # all but a few pixels of the edge are ignored
    small[1:63, 1:63] = 0
    small[20:30, 20:30] = small[0, 3:6] = 1
    for folder, mask, is_told in (('cells', inside, True), ('plain', 255 - inside, False), ('fields', fields, False),
                                  ('top', top, False), ('frame', small, False)):
        for n in range(4):
            save(tmp_path / folder / f'images/{n}.png', scene(n, 64))
            save(tmp_path / folder / f'masks/{n}.png', mask)
        notes = inspect(tmp_path / folder)[1].notes
        assert ('are the masks inverted?' in str(notes)) == is_told
        assert ('If so type mask_values="{0: 1, 255: 0}"' in str(notes)) == is_told


def test_the_line_that_inverts_typed_colours_is_short(tmp_path):
    """Black text with grey noise: its hundred values are not listed."""
    draw, masks = np.random.default_rng(0), []
    for _ in range(4):
        picture = np.full((64, 64, 3), 255, np.uint8)
        picture[:3] = 0
        picture[5] = draw.integers(0, 256, (64, 3))
        masks.append(PIL.Image.fromarray(picture))
    folder = with_masks(tmp_path, masks)
    first = offered(ask(folder), 'mask_values="{')
    note, = [note for note in inspect(folder, **typed(first))[1].notes if 'inverted' in note]
    assert note.endswith("type mask_values=\"{'#000000': 1, '#ffffff': 0}\"")


# --- palettes -------------------------------------------------------------------------


def test_a_black_object_in_a_palette_of_many_colours_is_an_object(tmp_path):
    """Ids of chloroplasts in a palette that gives one of them black and the ground a colour."""
    colours = np.random.default_rng(0).integers(1, 256, (256, 3)).astype(np.uint8)
    colours[5] = 0
    masks = []
    for n in range(4):
        ids = np.zeros((64, 64), np.uint8)
        for number in range(1, 20 + n):
            ids[number * 2, :30] = number
        masks.append(PIL.Image.fromarray(ids))
        masks[-1].putpalette(colours.tobytes())
    data = inspect(with_masks(tmp_path, masks, '.tif'), mask_values='nonzero')[1]
    assert data.shares[1] < 0.2


def test_a_palette_made_for_one_picture_means_its_colours(tmp_path):
    """What quantizing a picture of colours gives: its numbers follow no order."""
    masks = []
    for n in range(4):
        picture = np.zeros((64, 64, 3), np.uint8)
        picture[:20], picture[40:] = (0, 255, 0), (255, 0, 0)
        picture = np.roll(picture, 9 * n, 0)
        masks.append(PIL.Image.fromarray(picture).quantize(3))
    assert "'#000000'" in str(ask(with_masks(tmp_path, masks)))


def test_palettes_made_for_their_files_are_no_black_and_white(tmp_path):
    """They mean their colours, those of other files their numbers."""
    classes = np.arange(576).reshape(24, 24) % 3
    for n in range(9):
        save(tmp_path / f'images/{n}.png', scene(n))
        order = np.roll([0, 1, 2], n % 3)
        palette_mask(tmp_path / f'masks/{n}.png', np.argsort(order)[classes], COLOURS[order])
    config, data = inspect(tmp_path, **typed(offered(ask(tmp_path), 'mask_values="{')))
    for n in range(9):
        mask = data.coding.encode(train_unet.read_mask(str(tmp_path / f'masks/{n}.png'), config))
        assert np.array_equal(mask, np.array([0, 2, 1])[classes])


@pytest.mark.parametrize('case', ['numbered anew', 'stray colours'])
def test_palettes_beside_colours_get_a_line_of_colours(tmp_path, case):
    """Dubai's tiles, whose palettes differ; clouds, whose coloured masks hold single pixels of other colours."""
    classes = np.arange(24).repeat(24).reshape(24, 24) % 3
    for n in range(12):
        save(tmp_path / f'images/{n}.png', scene(n))
        if n < 8:
            mask = COLOURS[classes]
            mask[0, 0] += case == 'stray colours' and n == 0
            save(tmp_path / f'masks/{n}.png', mask)
        else:
            order = np.array([[0, 1, 2], [0, 2, 1]])[n % 2 if case == 'numbered anew' else 0]
            palette_mask(tmp_path / f'masks/{n}.png', np.argsort(order)[classes], COLOURS[order])
    line = offered(ask(tmp_path), 'mask_values="{')
    assert typed(line) == {'mask_values': {'#000000': 0, '#008000': 1, '#800000': 2}}
    wish = typed(line)['mask_values'] | ({'#010101': 255} if case == 'stray colours' else {})
    config, data = inspect(tmp_path, mask_values=wish)
    for n in (9, 10):
        mask = data.coding.encode(train_unet.read_mask(str(tmp_path / f'masks/{n}.png'), config))
        assert np.array_equal(mask, np.array([0, 2, 1])[classes])


def test_colours_that_no_palette_holds_are_in_the_line_too(tmp_path):
    for n in range(12):
        classes = np.arange(576).reshape(24, 24) // 200
        save(tmp_path / f'images/{n}.png', scene(n))
        if n < 6:
            mask = COLOURS[classes]
            mask[0, :6] = [0, 0, 128]
            save(tmp_path / f'masks/{n}.png', mask)
        else:
            order = np.array([[0, 1, 2], [0, 2, 1]])[n % 2]
            palette_mask(tmp_path / f'masks/{n}.png', np.argsort(order)[classes], COLOURS[order])
    assert '#000080' in typed(offered(ask(tmp_path), 'mask_values="{'))['mask_values']


def test_what_a_palette_ignores_stays_ignored_where_colours_are_named(tmp_path):
    for n in range(6):
        save(tmp_path / f'images/{n}.png', scene(n))
        palette = [[0, 0, 0], [128, 0, 0], *[[9, 9, 9]] * 253, [224, 224, 192]]
        palette_mask(tmp_path / f'masks/{n}.png', corner(0, 0, 1) + corner(9, 9), palette)
    config, data = inspect(tmp_path, mask_values={'#800000': 1})
    mask = data.coding.encode(train_unet.read_mask(str(tmp_path / 'masks/0.png'), config))
    assert np.array_equal(mask, corner(0, 0, 1) + corner(9, 9))
    assert 255 in data.values and 255 not in inspect(tmp_path, mask_values={'#800000': 1}, ignore_index=None)[1].values
    config, data = inspect(tmp_path, mask_values={'#800000': 1, '#e0e0c0': 2})
    mask = data.coding.encode(train_unet.read_mask(str(tmp_path / 'masks/0.png'), config))
    assert np.array_equal(mask, corner(0, 0, 1) + corner(9, 9, 2))


def test_white_under_several_numbers_can_be_named(tmp_path):
    """KolektorSDD: masks that are all 0, some of a palette of black and white, one of three greys."""
    for n in range(8):
        save(tmp_path / f'images/{n}.png', scene(n))
        palette, numbers = ([[0] * 3, [255] * 3], 1) if n % 2 else ([[0] * 3, [85] * 3, [255] * 3], 2)
        palette_mask(tmp_path / f'masks/{n}.png', corner(0, 0, numbers) + corner(9, 9, n == 0), palette)
    line = next(line for line in ask(tmp_path).problems if ' type ' in line)
    assert typed(line.split(' type ')[1]) == {'mask_values': {'#ffffff': 1}}
    config, data = inspect(tmp_path, mask_values={'#ffffff': 1})
    for n in range(8):
        mask = data.coding.encode(train_unet.read_mask(str(tmp_path / f'masks/{n}.png'), config))
        assert np.array_equal(mask, corner(0, 0) > 0)


@pytest.mark.parametrize('size, is_told', [(96, True), (4, False)])
def test_images_without_an_object_that_are_trained_on_too_count_where_they_have_one_name(tmp_path, size, is_told):
    """Concrete of which most tiles show no crack: all 18 for the test were trained on, 7 were told. Black slices of
    scans have names that come again too."""
    for n in range(12):
        for split in ('train', 'test')[:1 + n // 6]:
            photo = np.random.default_rng(n).integers(0, 256, (size, size, 3)) if size > 4 else np.zeros((4, 4, 3))
            save(tmp_path / f'{split}/images/{n}.png', photo)
            save(tmp_path / f'{split}/masks/{n}.png', np.zeros((size, size)))
        save(tmp_path / 'train/images/x.png', scene(9))
        save(tmp_path / 'train/masks/x.png', corner(3, 3))
    notes = [note for note in inspect(tmp_path, val_fraction=0)[1].notes if 'trained on too' in note]
    assert [note.split(' of ')[0] for note in notes] == ['trained on too: 6 images'] * is_told


def test_frames_without_an_object_that_have_other_names_are_no_copies(tmp_path):
    """Of a camera at rest."""
    for n, split in enumerate(['train', 'train', 'test', 'test']):
        save(tmp_path / f'{split}/images/{n}.png', scene(9))
        save(tmp_path / f'{split}/masks/{n}.png', np.zeros_like(corner(3, 3)))
    save(tmp_path / 'train/images/x.png', scene(8))
    save(tmp_path / 'train/masks/x.png', corner(3, 3))
    assert not leaks(inspect(tmp_path, val_fraction=0)[1])


def test_photographs_that_are_named_after_masks_are_not_taken_for_them(tmp_path):
    """Lucchi++: Train_In/mask0000.png is a photograph, Train_Out/0.png its mask."""
    draw = np.random.default_rng(0)
    for split in ('Train', 'Test'):
        for n in range(8):
            save(tmp_path / f'set/{split}_In/mask{n:04}.png', draw.integers(0, 256, (24, 24, 3)))
            save(tmp_path / f'set/{split}_Out/{n}.png', corner(n, 3))
    assert 'looks like a photograph and its image' in str(ask(tmp_path / 'set'))
    settings = typed(typed_lines(ask(tmp_path / 'set'))[0])
    _, data = inspect(tmp_path / 'set', **settings)
    assert (sorted(data.values), split_sizes(data)[2]) == ([0, 255], 8)


def test_dark_images_beside_the_ids_of_many_cells_are_not_taken_for_masks(tmp_path):
    """Fluorescence with Cellpose's masks: few of 256 greys are used, and the background is the smaller part."""
    draw, cells = np.random.default_rng(0), np.arange(64 * 64).reshape(64, 64) // 8
    for n in range(6):
        save(tmp_path / f'set/{n}_img.png', draw.gamma(2, 6, (64, 64)).clip(0, 255))
        save(tmp_path / f'set/{n}_masks.png', cells.astype(np.uint16))
    assert 'mask_values=nonzero' in str(ask(tmp_path / 'set'))
    assert split_sizes(inspect(tmp_path / 'set', mask_values='nonzero')[1]) == [5, 1, 0]
    for n in range(6):
        save(tmp_path / f'set/{n}_img.png', draw.integers(0, 2, (64, 64)) * 255)       # drawings in black and white
    assert 'If not, say what the masks hold in mask_values' in str(ask(tmp_path / 'set'))
    assert split_sizes(inspect(tmp_path / 'set', mask_values='nonzero')[1]) == [5, 1, 0]
    for kind, end in (('images', '_img'), ('masks', '_masks')):
        (tmp_path / 'set' / kind).mkdir()
        for n in range(6):
            os.rename(tmp_path / f'set/{n}{end}.png', tmp_path / f'set/{kind}/{n}{end}.png')
    assert 'swapped' not in str(ask(tmp_path / 'set'))


# --- files that list the classes ------------------------------------------------------


COLOURED = {'void': (0, 0, 0), 'road': (128, 0, 0), 'tall grass': (0, 128, 0), 'sky': (0, 0, 128)}
LISTS = {
    'CVAT, labelmap.txt': ('# label:color_rgb:parts:actions', '{name}:{r},{g},{b}::'),
    'class_dict.csv': ('name,r,g,b', '{name},{r},{g},{b}'),
    'numbered colours.txt': ('Class\tR\tG\tB', '{n}\t{r} \t{g}\t {b}\t{name}'),
    'label_colors.txt': ('', '{r} {g} {b}\t\t{name}'),
    'Labels and Colors.csv': ('Label,color_rgb', '{name},"{r},{g},{b}"'),
}


def write_colours(path, left_out=()):
    """A list of COLOURED, in the form that LISTS has for a file of this name."""
    head, line = LISTS[path.name]
    path.write_text('\n'.join([head, *(line.format(n=n, name=name, r=r, g=g, b=b) for n, (name, (r, g, b))
                                       in enumerate(COLOURED.items(), 1) if name not in left_out)]))


def coloured(folder, shares=(2, 20, 20, 22)):
    """Four masks of the colours of COLOURED, each in so many of 64 columns."""
    mask = np.uint8([*COLOURED.values()]).repeat(shares, 0)[:, None].repeat(64, 1)
    return with_masks(folder, [PIL.Image.fromarray(mask)] * 4)


def line_of_list(told):
    """The settings that a class list gives, of an error or of notes."""
    lines = getattr(told, 'problems', told)
    return [typed(line.split(': type ')[1]) for line in lines if 'lists the classes: type ' in line]


@pytest.mark.parametrize('name', LISTS)
def test_colours_get_the_names_and_the_order_of_a_file(tmp_path, name):
    folder = coloured(tmp_path)
    write_colours(folder / name)
    settings, = line_of_list(ask(folder))
    assert settings == {'class_names': ['road', 'tall grass', 'sky'],
                        'mask_values': {'#000000': 255, '#800000': 0, '#008000': 1, '#000080': 2}}
    config, data = inspect(folder, **settings)
    assert list(data.classes) == [0, 1, 2, 255] and 'tall grass' in '\n'.join(
        train_unet.describe_data(data, config))


def test_a_common_void_is_a_class_an_unlisted_black_the_background(tmp_path):
    folder = coloured(tmp_path, (30, 14, 10, 10))
    write_colours(folder / 'class_dict.csv')
    settings, = line_of_list(ask(folder))
    assert settings['class_names'] == ['void', 'road', 'tall grass', 'sky']
    write_colours(folder / 'class_dict.csv', left_out='void')
    settings, = line_of_list(ask(folder))
    assert settings['class_names'] == ['background', 'road', 'tall grass', 'sky']
    assert settings['mask_values']['#000000'] == 0


@pytest.mark.parametrize('black, name', [('ground:0,0,0::\n', 'ground'), ('', 'background')])
def test_a_stray_colour_does_not_hide_the_list_of_classes(tmp_path, black, name):
    """CVAT's labelmap.txt, and three pixels of no class in one file; the second list does not name black."""
    (tmp_path / 'labelmap.txt').write_text(f'# label:color_rgb:parts:actions\n{black}red:128,0,0::\ngreen:0,128,0::\n')
    for n in range(6):
        mask = COLOURS[np.arange(4096).reshape(64, 64) % 3]
        mask[0, :3] = [5, 4, 5] if n == 0 else mask[0, :3]
        save(tmp_path / f'images/{n}.png', scene(n, 64))
        save(tmp_path / f'masks/{n}.png', mask)
    assert line_of_list(ask(tmp_path)) == [{
        'mask_values': {'#000000': 0, '#800000': 1, '#008000': 2, '#050405': 255},
        'class_names': [name, 'red', 'green']}]


def test_a_rare_black_that_is_not_listed_is_the_background_all_the_same(tmp_path):
    (tmp_path / 'labelmap.txt').write_text('# label:color_rgb:parts:actions\nred:128,0,0::\ngreen:0,128,0::\n')
    for n in range(6):
        mask = COLOURS[1 + np.arange(4096).reshape(64, 64) % 2]
        mask[0, :3] = 0 if n == 0 else mask[0, :3]
        save(tmp_path / f'images/{n}.png', scene(n, 64))
        save(tmp_path / f'masks/{n}.png', mask)
    assert line_of_list(ask(tmp_path)) == [{'mask_values': {'#000000': 0, '#800000': 1, '#008000': 2},
                                            'class_names': ['background', 'red', 'green']}]


def test_a_common_colour_that_is_not_listed_hides_the_list(tmp_path):
    (tmp_path / 'labelmap.txt').write_text('ground:0,0,0::\nred:128,0,0::\n')
    for n in range(6):
        save(tmp_path / f'images/{n}.png', scene(n, 64))
        save(tmp_path / f'masks/{n}.png', COLOURS[np.arange(4096).reshape(64, 64) // 1500])
    assert line_of_list(ask(tmp_path)) == []


@pytest.mark.parametrize('name, text, settings', [
    ('train/_classes.csv', 'Pixel Value, Class\n0, background\n1, wall\n2, tall door\n',
     {'class_names': ['background', 'wall', 'tall door']}),
    ('labels.csv', 'wall,1\nbackground,0\ndoor,2\n', {'class_names': ['background', 'wall', 'door']}),
    ('codes.txt', 'Background\nWall\nDoor\nStair\n',
     {'class_names': ['Background', 'Wall', 'Door', 'Stair'], 'num_classes': 4}),
    ('labels.txt', '__ignore__\n_background_\nwall\ndoor\n', {'class_names': ['_background_', 'wall', 'door']}),
    ('names_of_classes.csv', 'name\nbackground\nwall\ndoor\n', {'class_names': ['background', 'wall', 'door']}),
    ('labels.txt', 'Ego car\nPainted driv. instr.\nTraffic guide obj.\n',                               # A2D2
     {'class_names': ['Ego car', 'Painted driv. instr.', 'Traffic guide obj.']}),
    ('labels.txt', '0 void\n1 wall\n2 door\n', {'class_names': ['wall', 'door'], 'mask_values': {0: 255, 1: 0, 2: 1}}),
    ('codes.tsv', 'label\tGT_code\nwall\t0\noutside_roi\t1\ndoor\t2\n',
     {'class_names': ['wall', 'door'], 'mask_values': {0: 0, 1: 255, 2: 1}}),
    ('codes.tsv', 'label\tGT_code\noutside_roi\t0\nwall\t1\ndoor\t2\n',                  # of few pixels
     {'class_names': ['wall', 'door'], 'mask_values': {0: 255, 1: 0, 2: 1}}),
])
def test_numbers_get_the_names_of_a_file(tmp_path, name, text, settings):
    masks = [np.repeat([0, 1, 2], [2, 40, 22]).repeat(64).reshape(64, 64)] * 4
    folder = with_masks(tmp_path, masks)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    assert line_of_list(inspect(folder)[1].notes) == [settings]
    assert not line_of_list(inspect(folder, **settings)[1].notes)


@pytest.mark.parametrize('name, text', [
    ('labels.txt', 'cat\ndog\ncow\nhen\nelk\nape\nbat\n'),              # of boxes
    ('labels.txt', 'cat\n'), ('labels.txt', 'cat\ncat\ncat\n'), ('labels.txt', ''),
    ('labels.csv', 'image,label\na.png,cat\nb.png,dog\nc.png,cow\n'),
    ('classes.csv', 'value,name\n0,cat\n1,dog\n'),                      # lacks what the masks hold
    ('classes.csv', 'value,name\n0,a$(rm -rf x)\n1,b\n2,c\n'),
    ('labels.csv', 'id,diagnosis\nscan0,0\nscan1,1\nscan2,2\nscan3,1\n'),        # of whole images
    ('classes.csv', 'id,name,count\n2,cat,300\n0,background,900\n1,dog,200\n'),
    ('readme.txt', 'cat\ndog\ncow\n'),
])
def test_other_files_name_no_classes(tmp_path, name, text, make_pipe):
    masks = [np.repeat([0, 1, 2], [2, 40, 22]).repeat(64).reshape(64, 64)] * 4
    folder = with_masks(tmp_path, masks)
    (folder / name).write_text(text)
    assert not line_of_list(inspect(folder)[1].notes)
    for content in (b'\xff\xfe\x00', b'cat, ' + 5000 * b'9', b'cat ' * 2**20):
        (folder / name).write_bytes(content)
        assert not line_of_list(inspect(folder)[1].notes)
    (folder / name).unlink()
    make_pipe(folder / name)
    assert not line_of_list(inspect(folder)[1].notes)


@pytest.mark.parametrize('values, shares, text', [
    ([255], [64], 'cat\ndog\n'), ([0, 255], [40, 24], 'nucleus\n'), ([0, 255], [40, 24], 'cat\ndog\n'),
    ([0, 1], [2, 62], '0 unlabeled\n1 object\n')], ids=['nothing', 'one name', 'two of boxes', 'one that counts'])
def test_masks_of_one_class_get_no_names(tmp_path, values, shares, text):
    folder = with_masks(tmp_path, [np.repeat(values, shares).repeat(64).reshape(64, 64)] * 4)
    (folder / 'labels.txt').write_text(text)
    assert not line_of_list(inspect(folder)[1].notes)


def test_an_ignored_value_stays_so_however_common_and_named(tmp_path):
    folder = with_masks(tmp_path, [np.repeat([0, 1, 2, 255], [20, 14, 10, 20]).repeat(64).reshape(64, 64)] * 4)
    (folder / '_classes.csv').write_text('Pixel Value, Class\n0, background\n1, cat\n2, dog\n255, void\n')
    assert line_of_list(inspect(folder)[1].notes) == [{'class_names': ['background', 'cat', 'dog']}]


def test_lists_of_classes_that_differ_from_image_to_image_are_told(tmp_path):
    """labelme_json_to_dataset numbers the classes of each image anew, and says so in label_names.txt."""
    for n in range(6):
        save(tmp_path / f'{n}_json/img.png', scene(n))
        save(tmp_path / f'{n}_json/label.png', np.arange(24).repeat(24).reshape(24, 24) % (3 - n % 2), 'P')
        (tmp_path / f'{n}_json/label_names.txt').write_text('_background_\ncat\ndog\n' if n % 2 == 0 else
                                                            '_background_\ndog\n')
    settings = {'image_pattern': '{stem}img.png', 'mask_pattern': '{stem}label.png'}
    told = [note for note in inspect(tmp_path, **settings)[1].notes if 'label_names.txt l' in note]
    assert len(told) == 1 and ' lists other classes than ' in told[0] and 'class_names=' not in told[0]


def test_lists_of_classes_that_end_in_other_ways_are_the_same(tmp_path):
    """Roboflow's _classes.csv in train, valid and test, one with the line ends of Windows."""
    for split, ending in (('train', '\n'), ('valid', '\r\n'), ('test', '\n')):
        for n in range(4):
            save(tmp_path / f'{split}/{split}{n}.jpg', scene(n))
            save(tmp_path / f'{split}/{split}{n}_mask.png', corner(0, 0, 1) + corner(9, 9, 2))
        lines = ['Pixel Value, Class', '0, background', '1, cat', '2, dog'][:4 - (split == 'test')]        # seen there
        (tmp_path / split / '_classes.csv').write_bytes(ending.join(lines).encode())
    assert line_of_list(inspect(tmp_path)[1].notes) == [{'class_names': ['background', 'cat', 'dog']}]


def test_a_folder_named_after_masks_comes_before_a_larger_one_that_is_not(tmp_path):
    """Results of a threshold, Otsu/, for all images; drawn masks for some."""
    for n in range(12):
        save(tmp_path / f'root/{n}.png', scene(n))
        save(tmp_path / f'Otsu/{n}.png', corner(n, 3))
    for n in range(0, 12, 3):
        save(tmp_path / f'mask/{n}.png', corner(n, 4))
    assert typed_lines(ask(tmp_path)) == ['images="root" masks="mask" skip_unpaired=True', 'images="root" masks="Otsu"']


def test_an_image_without_a_mask_is_left_out_by_a_line_although_the_masks_are_jpeg(tmp_path):
    """Colours as JPEG are as little flat as photographs."""
    for n in range(10):
        colour = np.zeros((48, 48, 3))
        colour[8:30, 8:8 + 3 * n + 6], colour[20:44, 20:40] = (190, 33, 0), (60, 190, 254)
        save(tmp_path / f'images/{n}.png', scene(n, 48))
        noisy_jpeg(tmp_path / f'masks/{n}_mask.jpg', colour)
    os.remove(tmp_path / 'masks/4_mask.jpg')
    assert 'the mask values are not clear' in str(ask(tmp_path, **typed(typed_lines(ask(tmp_path))[0])))


def test_masks_of_all_splits_are_offered_rather_than_those_of_one(tmp_path):
    """Those of train/, whose images look more like photographs, came first, and alone."""
    for split, n in [*zip(6 * ['train'] + 2 * ['test', 'val'], range(10))]:
        calm = np.full((24, 24, 3), n)
        calm[:2] = np.arange(48).reshape(2, 24, 1)                     # a little more than a mask would show
        save(tmp_path / f'original/{split}/img{n}.png', scene(n) if split == 'train' else calm)
        if n != 9:
            save(tmp_path / f'mask/{split}/img{n}_mask.png', corner(n, 3))
    lines = typed_lines(ask(tmp_path))
    _, data = inspect(tmp_path, **typed(lines[0]))
    assert split_sizes(data) == [6, 1, 2] and not [line for line in lines if 'train' in line]


@pytest.mark.parametrize('image, mask', [('sat/A01_s{}_w1.png', 'map/task-1{0}-annotation-3-by-{0}.png'),
                                         ('8bit_s{}.jpg', '16bit_s{}.png')])
def test_patterns_whose_numbers_differ_pair_no_others(tmp_path, image, mask):
    """Label Studio: image 2 of well A01, and an annotation that somebody numbered 3."""
    pairs = {image.format(n): mask.format(n) for n in range(8)}
    for n in range(8):
        save(tmp_path / 'set' / image.format(n), scene(n))
        save(tmp_path / 'set' / mask.format(n), corner(n, 3))
    lines = typed_lines(ask(tmp_path / 'set'))
    for line in lines:
        assert partners(inspect(tmp_path / 'set', **typed(line))[1], tmp_path / 'set') == pairs
    assert lines or 'map' in mask


def test_two_sets_side_by_side_are_offered_each_with_its_own_masks(tmp_path):
    """Of the larger set's images those of the smaller set's numbers were offered with the smaller one's masks."""
    for folder, count in {'img': 24, 'image': 8}.items():
        for n in range(count):
            save(tmp_path / f'{folder}/{n}.png', scene(n + len(folder)))
            save(tmp_path / f'{ {"img": "label", "image": "mask"}[folder]}/{n}.png', corner(n % 12, len(folder)))
    assert typed_lines(ask(tmp_path)) == ['images="img" masks="label"', 'images="image" masks="mask"']


def test_a_colour_off_by_one_is_no_class_of_its_own(tmp_path):
    blue = np.zeros((64, 64, 3), np.uint8)
    blue[20:40, 20:60] = 1, 1, 255
    masks = [blue.copy() for _ in range(6)]
    masks[0][20, 20:40], masks[0][20, 40] = (1, 2, 255), (1, 4, 255)   # 1 in 1200 pixels
    lines = [line for line in ask(with_masks(tmp_path, masks)).problems if ' type ' in line]
    assert 'mask_values="{\'#000000\': 0, \'#0101ff\': 1, \'#0102ff\': 1, \'#0104ff\': 1}"' in lines[0]
    assert lines[-1].startswith("if only '#0101ff' is foreground")


def test_numbers_of_classes_in_the_red_channel_are_classes(tmp_path):
    """CARLA: #070000 is a road, #080000 a sidewalk."""
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[10:40, :, 0], mask[40:42, :, 0] = 7, 8
    line = offered(ask(with_masks(tmp_path, [mask] * 6)), 'mask_values="{')
    assert typed(line) == {'mask_values': {'#000000': 0, '#070000': 1, '#080000': 2}}


@pytest.mark.parametrize('ink, is_first', [((0, 52, 53, 217, 251), True), ((0, 1, 2), False)])
def test_dark_on_white_is_offered(tmp_path, ink, is_first):
    """Dots with soft edges, drawn on a white page; not before others where the dark may be classes in a void."""
    mask = np.full((64, 64), 255, np.uint8)
    mask[10, 10:10 + len(ink)] = ink
    lines = [line for line in ask(with_masks(tmp_path, [mask] * 6)).problems if ' type ' in line]
    dark = 'if dark is foreground type mask_values="<128"'
    assert (lines[0] == dark) == is_first and dark in lines
    _, data = inspect(tmp_path, mask_values='<128')
    assert data.coding.num_classes == 2 and (data.values[0][0], data.values[255][0]) == (6, 6 * (64 ** 2 - len(ink)))


def test_a_set_of_few_masks_is_offered_beside_results_and_pictures_of_it(tmp_path):
    """edges/ of all images, a program's, and resized/ ones of those that have a mask were offered instead."""
    for n in range(6):
        save(tmp_path / f'images/{n}.png', scene(n))
        save(tmp_path / f'edges/{n}.png', corner(n, 9))
        if n < 4:
            save(tmp_path / f'masks/{n}.png', corner(n, 3))
            save(tmp_path / f'resized/{n}.png', scene(n) // 2)
    assert 'images="images" masks="masks" skip_unpaired=True' in typed_lines(ask(tmp_path))


def test_of_large_objects_with_soft_edges_dark_is_offered_last(tmp_path):
    mask = cv2.resize(cv2.circle(np.zeros((256, 256), np.uint8), (128, 128), 116, 255, -1), (32, 32), interpolation=3)
    mask = (mask // 64 * 64 + mask // 64 * 64 // 192 * 63).astype(np.uint8)            # 0, 64, 128, 255
    lines = [line for line in ask(with_masks(tmp_path, [mask] * 6)).problems if ' type ' in line]
    assert 'if dark is foreground type mask_values="<128"' in lines[1:]


def test_neighbouring_colours_may_be_classes(tmp_path):
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[10:50], mask[30:33, 20:40] = (200, 0, 0), (201, 0, 0)         # 1.5 % of the pixels
    line = offered(ask(with_masks(tmp_path, [mask] * 6)), 'mask_values="{')
    assert typed(line) == {'mask_values': {'#000000': 0, '#c80000': 1, '#c90000': 2}}


def test_neighbouring_colours_of_few_pixels_each_are_two(tmp_path):
    masks = [np.zeros((64, 64, 3), np.uint8) for _ in range(6)]
    for mask in masks:
        mask[10:50] = 0, 200, 0
    masks[0][5, :11], masks[0][5, 20:29] = (200, 0, 0), (201, 0, 0)    # neither is ten times as frequent
    line, = [line for line in ask(with_masks(tmp_path, masks)).problems if 'these colours are the classes' in line]
    assert typed(line.split(' type ')[1])['mask_values'] == {'#000000': 0, '#00c800': 1, '#c80000': 2, '#c90000': 3}


@pytest.mark.parametrize('name', ['labels/Labels [{}].tif', 'masks/Mask of img-{}.png'])
@pytest.mark.parametrize('digits', [1, 2])
@pytest.mark.parametrize('first', [0, 1])
def test_the_first_of_numbered_masks_may_have_no_number(tmp_path, name, first, digits):
    """As napari and ImageJ name them. Where the images count from 1 the numbers would pair each with the next one."""
    for n in range(12):
        save(tmp_path / f'images/img_{n + first:0{digits}}.png', scene(n))
        save(tmp_path / (name.format(n) if n else re.sub(r'\W*\{}\W*?(?=[.])', '', name)), corner(n % 9, n))
    lines = [line for line in typed_lines(ask(tmp_path)) if 'skip_unpaired' in line]
    assert len(lines) == 1 - first


def test_a_mask_of_all_beside_those_of_the_images_takes_no_line_away(tmp_path):
    for n in range(1, 13):
        save(tmp_path / f'images/img_{n}.png', scene(n))
        save(tmp_path / f'masks/mask_{n}.png', corner(n, n))
    save(tmp_path / 'masks/mask.png', corner(3, 3))                    # an overview
    assert 'images="images" masks="masks" skip_unpaired=True' in typed_lines(ask(tmp_path))


def test_older_masks_are_not_offered_first(tmp_path):
    for n in range(6):
        save(tmp_path / f'images/{n}.png', scene(n))
        for kind in ('old', 'final'):
            save(tmp_path / f'masks_{kind}/{n}.png', corner(n, n))
    assert 'masks_final' in typed_lines(ask(tmp_path))[0]


def test_masks_that_are_pointers_hide_no_line(tmp_path):
    """VCOD-CD: most of label/ are pointers of Git LFS, and no line was offered, nor anything said of them."""
    for n in range(9):
        for side in 'AB':
            save(tmp_path / f'{side}/{n}.png', scene(10 * n + ord(side), 48))
        (tmp_path / 'label').mkdir(exist_ok=True)
        (tmp_path / f'label/{n}.png').write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n')
    assert {*typed_lines(ask(tmp_path))} == {f'images="{side}" masks="label"' for side in 'AB'}
    assert 'label/0.png: cannot be read: is a pointer of Git LFS' in str(ask(tmp_path, images='B', masks='label'))


def test_a_picture_of_a_set_beside_its_folder_is_no_image_of_masks(tmp_path):
    """segmentation_WBC: 'Dataset 1.png' shows samples of 'Dataset 1/', which holds 001.bmp and its mask 001.png."""
    for part in (1, 2):
        save(tmp_path / f'Dataset {part}.png', scene(part, 48))
        for n in range(6):
            save(tmp_path / f'Dataset {part}/{n:03}.bmp', scene(10 * part + n))
            save(tmp_path / f'Dataset {part}/{n:03}.png', corner(n, 2))
    assert 'mask_pattern="{stem}.png"' in ' '.join(typed_lines(ask(tmp_path)))


def test_the_masks_of_an_image_may_lie_there_in_two_formats(tmp_path):
    """They were refused once a folder of images and masks of equal stems was no folder of one image's masks."""
    for n in range(6):
        save(tmp_path / f'images/{n}.jpg', scene(n))
        for number, kind in itertools.product(range(3), ('png', 'bmp')):
            save(tmp_path / f'masks/{n}/{number}.{kind}', corner(n, 7 * number))
    assert 'its masks united' in inspect(tmp_path)[1].pairs.rule


def test_masks_of_hand_come_before_more_that_a_program_made(tmp_path):
    """TargetSelection: 13 folders with both, and 6 further images that only the program has masks of."""
    for n in range(13):
        save(tmp_path / f'data/{n}/input.png', scene(n))
        for name in ('mask', 'pred'):
            save(tmp_path / f'data/{n}/{name}.png', corner(8, 8))
    for n in range(6):
        save(tmp_path / f'samples/{n}_input.png', scene(20 + n))
        save(tmp_path / f'samples/{n}_pred.png', corner(8, 8))
    first, *_ = typed_lines(ask(tmp_path))
    assert 'mask.png' in first and 'pred' not in first


def test_a_folder_is_named_where_a_star_pairs_no_more(tmp_path):
    """barrel_detector: half of the images have masks, and matrices lie beside them."""
    for n in range(8):
        save(tmp_path / f'trainset/{n}.png', scene(n))
    for n in range(4):
        save(tmp_path / f'masks/{n}.npy', corner(8, 8, 1))
    for name in 'abcdef':
        save(tmp_path / f'parameters/{name}.npy', np.eye(3))
    first, *_ = typed_lines(ask(tmp_path))
    assert 'images="trainset" masks="masks"' in first


@pytest.mark.parametrize('name', ['brightfield_{}', 'x{} bright field', 'Bright-Field {}'])
def test_brightfield_is_a_microscope_not_an_augmentation(tmp_path, name):
    fill(tmp_path, *([f'{kind}/{name.format(n)}.png' for n in range(12)] for kind in ('images', 'masks')))
    assert 'augmented' not in str(inspect(tmp_path)[1].notes)


def test_photographs_of_a_folder_that_a_mask_word_names_may_be_images(tmp_path):
    for n in range(12):
        for kind in ('lab', 'field'):
            save(tmp_path / f'two/{kind}_images/{n}.png', scene(n + 50 * (kind == 'lab')))
            save(tmp_path / f'two/{kind}_masks/{n}.png', corner(n, 8))
        save(tmp_path / f'one/seg_images/{n}.png', scene(n))
        save(tmp_path / f'one/seg_masks/{n}.png', corner(n, 8))
    assert typed_lines(ask(tmp_path / 'one')) == ['images="seg_images" masks="seg_masks"']
    first, *rest = typed_lines(ask(tmp_path / 'two'))
    assert any('lab_images' in line for line in (first, *rest))


def test_plain_masks_are_offered_beside_what_was_drawn_of_them(tmp_path):
    """EISeg saves label/x.png and label/x_pseudo.png among the images."""
    for n in range(12):
        save(tmp_path / f'img/x{n}.jpg', scene(n))
        save(tmp_path / f'img/label/x{n}.png', corner(n, 8, 1))
        save(tmp_path / f'img/label/x{n}_pseudo.png', corner(n, 8, 128))
    assert 'skip_unpaired=True' in typed_lines(ask(tmp_path))
    assert {*inspect(tmp_path, skip_unpaired=True)[1].values} == {0, 1}


def test_colour_images_of_which_some_have_no_mask_get_a_line(tmp_path):
    """A camera of depth writes color/ and depth/."""
    for n in range(12):
        save(tmp_path / f'color/{n}.png', scene(n))
    for n in range(6):
        save(tmp_path / f'masks/{n}.png', corner(n, 8))
    assert typed_lines(ask(tmp_path)) == ['skip_unpaired=True']
    for n in range(4):
        save(tmp_path / f'masks/q{n}.png', corner(n, 8))               # of other images
    assert typed_lines(ask(tmp_path)) == []


def test_a_list_with_a_number_of_each_image_beside_its_path_is_read(tmp_path):
    """DeepGlobe's metadata.csv."""
    for n in range(4):
        save(tmp_path / f'train/{n}_sat.jpg', scene(n))
        save(tmp_path / f'train/{n}_mask.png', corner(n, 8))
    lines = [f'{n},{"val" if n == 3 else "train"},train/{n}_sat.jpg,train/{n}_mask.png' for n in range(4)]
    (tmp_path / 'list.csv').write_text('\n'.join(['image_id,split,sat_image_path,mask_path', *lines]))
    assert split_sizes(inspect(tmp_path / 'list.csv')[1]) == [3, 1, 0]
    lines = [f'train/{n}_sat.jpg,train/{n}_mask.png' for n in range(4)]
    (tmp_path / 'list.csv').write_text('\n'.join(['image_id,mask', *lines]))
    assert len(inspect(tmp_path / 'list.csv')[1].pairs.images) == 4    # the only word for images


def test_folds_hold_out_each_image_once_where_one_of_them_is_there_twice(tmp_path):
    """Chance parts the copies in two folds of five; all five are drawn alike."""
    for twin in (7, 13, 21, 29):
        for n in range(30):
            save(tmp_path / f'{twin}/images/{n:02}.png', scene(0 if n == twin else n))
            save(tmp_path / f'{twin}/masks/{n:02}.png', np.eye(24))
        held = [names_of(inspect(tmp_path / str(twin), fold=fold)[1], 'val') for fold in range(5)]
        assert len(set().union(*held)) == 30


@pytest.mark.parametrize('white, wish', [(255, {}), (128, {'mask_values': {'#000000': 0, '#800000': 1}})])
def test_black_is_the_background_of_two_classes_wherever_a_file_names_it(tmp_path, white, wish):
    """DeepGlobe's roads: class_dict.csv names the road first."""
    colour = [255, 255, 255] if white == 255 else [128, 0, 0]
    masks = [corner(2, 3, 1)[..., None] * np.uint8(colour)] * 4
    folder = with_masks(tmp_path, masks)
    road = ','.join(map(str, colour))
    (folder / 'class_dict.csv').write_text(f'name,r,g,b\nroad,{road}\nbackground,0,0,0\n')
    told = inspect(folder)[1].notes if white == 255 else ask(folder)
    assert line_of_list(told) == [wish | {'class_names': ['background', 'road']}]


def test_the_pattern_for_augmented_images_holds_no_backslash(tmp_path):
    """cmd.exe hands on two where sh makes them one."""
    stems = [f'{way}{n}' for n in range(10, 20) for way in ('', 'rotated-90-', 'flipped-1-')]
    for n, stem in enumerate(stems):
        save(tmp_path / f'images/{stem}.png', scene(n))
        save(tmp_path / f'masks/{stem}.png', np.eye(24))
    line, = [note for note in inspect(tmp_path)[1].notes if ' type group_pattern=' in note]
    assert '\\' not in line
    data = inspect(tmp_path, **typed(line.split(' type ')[1]))[1]
    train, val = ({stem[-2:] for stem in names_of(data, split)} for split in ('train', 'val'))
    assert val and train.isdisjoint(val)


def test_no_folder_of_images_alone_is_offered_where_class_lists_differ(tmp_path):
    for at, view in enumerate(('front', 'side')):
        for n in range(6):
            save(tmp_path / f'images/{view}/{view}{n}.png', scene(6 * at + n))
            save(tmp_path / f'masks/{view}/{view}{n}.png', corner(n, 3, 1) + corner(12, 12, 2))
        (tmp_path / f'images/{view}/classes.txt').write_text(['train\nnose\nwindow', 'train\nwindow\nbogie'][at])
    note, = [note for note in inspect(tmp_path)[1].notes if 'number is one class here' in note]
    assert 'data=' not in note


def test_a_pipe_in_the_place_of_a_class_list_is_not_waited_for(tmp_path, make_pipe):
    for folder in 'ab':
        fill(tmp_path / folder, [f'images/{n}.png' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    (tmp_path / 'a/images/classes.txt').write_text('ground\ncell\n')
    make_pipe(tmp_path / 'b/images/classes.txt')
    assert len(inspect(tmp_path)[1].pairs.images) == 8


@pytest.mark.parametrize('name', ['background', 'Background', '_background_', 'bg'])
def test_a_white_background_that_a_file_names_is_the_background(tmp_path, name):
    masks = [255 - corner(2 + n, 3)[..., None].repeat(3, 2) for n in range(4)]
    folder = with_masks(tmp_path, masks)
    (folder / 'class_dict.csv').write_text(f'name,r,g,b\n{name},255,255,255\ncrack,0,0,0\n')
    assert line_of_list(inspect(folder)[1].notes) == [{'mask_values': {255: 0, 0: 1}, 'class_names': [name, 'crack']}]


def test_a_volume_that_is_packed_is_to_be_saved_as_pictures(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    (tmp_path / 'x.nii.gz').touch()
    assert 'to be saved as PNG or TIFF first' in str(inspect(tmp_path)[1].notes)


def test_black_keeps_its_place_among_three_classes(tmp_path):
    """Of two alone it comes first."""
    masks = [COLOURS[corner(2, 3, 1) + corner(12, 12, 2)] for _ in range(4)]
    folder = with_masks(tmp_path, masks)
    (folder / 'class_dict.csv').write_text('name,r,g,b\nroad,128,0,0\nground,0,0,0\ntree,0,128,0\n')
    assert line_of_list(ask(folder))[0]['class_names'] == ['road', 'ground', 'tree']


# --- layouts met in a hundred published sets of each kind ------------------------------


def lay_out(folder, images, masks):
    """Pictures that differ, and masks with a corner each, under these names."""
    for number, name in enumerate(images):
        save(folder / name, scene(number, 48))
    for number, name in enumerate(masks):
        save(folder / name, corner(number % 16, number // 2 % 16, 1, 48))


# name, images, masks, the first line that is offered, and what none of the lines may hold
LAYOUTS = [
    ('OCELOT: two views, one of them labelled', [f'images/{view}/{n}.jpg' for view in ('cell', 'tissue')
                                                             for n in range(4)],
     [f'annotations/tissue/{n}.png' for n in range(4)], 'images="images/tissue" masks="annotations"', 'images/cell"'),
    ('SUN-SEG: tests in folders further down',
     [*(f'TrainData/Frame/{n}.jpg' for n in range(16)),
      *(f'TestData/{k}/Frame/{n:02d}.jpg' for k in 'ab' for n in range(12))],
     [*(f'TrainData/GT/{n}.png' for n in range(16)),
      *(f'TestData/{k}/GT/{n:02d}.png' for k in 'ab' for n in range(12))],
     'images="TrainData/Frame" masks="TrainData/GT"', 'nothing'),
    ('MVTec: masks of tests alone', [*(f'{k}/train/good/{n:03d}.png' for k in 'ab' for n in range(4)),
                                     *(f'{k}/test/hole/{n:03d}.png' for k in 'ab' for n in range(4))],
     [f'{k}/ground_truth/hole/{n:03d}_mask.png' for k in 'ab' for n in range(4)],
     'images="*/*" masks="*/ground_truth" skip_unpaired=True', 'nothing'),
    ('BDD100K: train in the name of each mask',
     [f'seg/images/{s}/{c}{n}.jpg' for s, c in (('train', 'a'), ('val', 'b')) for n in range(4)],
     [f'seg/{kind}/{s}/{c}{n}_train_{end}.png' for kind, end in (('labels', 'id'), ('color_labels', 'color'))
      for s, c in (('train', 'a'), ('val', 'b')) for n in range(4)],
     'images="seg/images" masks="seg/labels"', 'labels/train'),
    ('Vaihingen: its name sounds like masks', [f'ISPRS_semantic_labeling/top/a{n}.tif' for n in range(4)],
     [f'ISPRS_semantic_labeling{place}/a{n}.tif' for place in ('/gts', '_ground_truth') for n in range(4)],
     'images="ISPRS_semantic_labeling/top" masks="ISPRS_semantic_labeling/gts"', 'nothing'),
    ('MATLAB: masks are counted, images have gaps', [f'images/{n:03d}.jpg' for n in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11)],
     [f'PixelLabelData/Label_{n}.png' for n in range(1, 9)], None, 'PixelLabelData'),
    ('a moon: its ground is beside it', [*(f'images/render/render{n:04d}.png' for n in range(1, 8)),
                                         *(f'real/PCAM{n}.png' for n in range(1, 4))],
     [*(f'images/ground/ground{n:04d}.png' for n in range(1, 8)), *(f'real/g_PCAM{n}.png' for n in range(1, 4))],
     'images="images/render" masks="images/ground"', 'nothing'),
]


@pytest.mark.parametrize('images, masks, first, unwanted', [case[1:] for case in LAYOUTS],
                         ids=[case[0] for case in LAYOUTS])
def test_layouts_of_published_sets(tmp_path, images, masks, first, unwanted):
    lay_out(tmp_path, images, masks)
    lines = typed_lines(ask(tmp_path))
    assert not [line for line in lines if re.search(unwanted, line)]
    assert first is None or lines[0] == first


def test_few_well_named_masks_are_offered_beside_many_pictures(tmp_path):
    """CT-ICH: the bone window was offered as the masks of the brain window; 318 of 2,814 images have a mask."""
    lay_out(tmp_path, [f'{p:03d}/{window}/{n}.jpg' for p in range(4) for window in ('brain', 'bone')
                       for n in range(1, 13)], [f'{p:03d}/brain/{n}_HGE_Seg.jpg' for p in range(4) for n in (3, 4)])
    for path in tmp_path.glob('*/bone/*'):
        save(path, np.asarray(PIL.Image.open(path).convert('L')) // 64 * 64)
    assert typed_lines(ask(tmp_path))[0] == 'skip_unpaired=True'
    assert len(inspect(tmp_path, skip_unpaired=True)[1].pairs.images) == 8


def test_maps_of_confidence_are_no_images(tmp_path):
    """KITTI-360: beside raw pictures of other names they were offered as the images of the classes."""
    lay_out(tmp_path, [f'rgb/x{n}_y.png' for n in range(12)] + [f'semantics/confidence/{n:04d}.png' for n in range(8)],
            [f'semantics/semantic/{n:04d}.png' for n in range(8)])
    assert not [line for line in typed_lines(ask(tmp_path)) if 'images="semantics' in line]


def test_two_tasks_under_one_name_are_told(tmp_path):
    lay_out(tmp_path, [f'images/{kind}/{kind}{n}.jpg' for kind in ('100k', '10k') for n in range(6)],
            [f'labels/{task}/masks/{kind}{n}.png' for task, kind in (('drivable', '100k'), ('sem_seg', '10k'))
             for n in range(6)])
    note, = [note for note in inspect(tmp_path)[1].notes if 'several tasks' in note]
    assert 'masks lie in labels/drivable and in labels/sem_seg,' in note


@pytest.mark.parametrize('images, masks', [('images/img-{0}/{0}{1}.png', 'masks/gt-{0}/{0}{1}.png'),
                                           ('images/{0}_{1}.png', 'masks/{0}/{0}_{1}.png'),
                                           ('images/{0}{1}.png', 'masks/{1}_{0}/{0}{1}.png')])
def test_folders_that_the_images_have_too_are_no_tasks(tmp_path, images, masks):
    names = [(kind, n) for kind in ('London', 'Paris') for n in range(6)]
    lay_out(tmp_path, *([form.format(*name) for name in names] for form in (images, masks)))
    assert 'several tasks' not in ' '.join(inspect(tmp_path)[1].notes)


def test_lists_with_a_number_before_the_name_tell_the_split(tmp_path):
    """DeepFish, written by pandas: ,ID,labels. By its folders all images in valid/, with fish, validated."""
    names = [f'{kind}/f{n}' for n in range(9) for kind in [('valid', 'valid', 'empty')[n % 3]]]
    lay_out(tmp_path, [f'images/{name}.jpg' for name in names], [f'masks/{name}.png' for name in names])
    for split, some in (('train', names[:5]), ('val', names[5:7]), ('test', names[7:])):
        rows = [f'{at},{name},1' for at, name in enumerate(some)]
        (tmp_path / f'{split}.csv').write_text('\n'.join([',ID,labels', *rows]))
    data = inspect(tmp_path)[1]
    assert [names_of(data, split) for split in train_unet.SPLITS] == [{f'f{n}' for n in some} for some in
                                                              (range(5), range(5, 7), range(7, 9))]


def test_boxes_of_numbers_are_no_masks_to_be_enlarged(tmp_path):
    """NASA's marine debris: (2, 5) is of the shape of (96, 128), give or take a pixel."""
    for n in range(4):
        save(tmp_path / f'images/{n}.png', scene(n, 96)[:, :64])
        np.save(tmp_path / f'labels_{n}.npy', np.ones((3, 2)))
    told = str(ask(tmp_path, images='images', masks='.', mask_pattern='labels_{stem}.npy'))
    assert 'rescale_masks=True' not in told


@pytest.mark.parametrize('images, masks, first', [
    ([f'images/{n}.jpg' for n in range(1, 10)], [f'masks/{k}/{n}.png' for k in (1, 2) for n in range(1, 10)],
     'images="images" masks="masks/1"'),
    ([f'images/{n}.jpg' for n in (1, 2, 3, *range(5, 13))], [f'masks/{n}_mask.png' for n in range(1, 11)],
     'images="images" masks="masks" skip_unpaired=True'),
    ([f'images/{n}.jpg' for n in range(1, 13)], [f'masks/mask_{n}.png' for n in range(1, 11)] + ['masks/extra.png'],
     'images="images" masks="masks" skip_unpaired=True'),
    ([f'images/{k}/{n}.jpg' for k in 'ab' for n in (1, 2, 3)],
     [f'masks/{k}/{p}/{n}.png' for k in 'ab' for p in (1, 2, 3) for n in (1, 2, 3)],
     'images="images/a" masks="masks/a/*"'),
    ([f'test_A/{n}.jpg' for n in range(20)] + [f'train_A/{n}.jpg' for n in range(20, 40)] +
     [f'figs/{n}.png' for n in 'abc'],
     [f'test_B/{n}.png' for n in range(20)] + [f'figs/{n}_gt.png' for n in 'abc'], 'images="test_A" masks="test_B"'),
], ids=['two persons', 'a photograph is lost', 'a whole count', 'persons below kinds', 'figures'])
def test_lines_that_were_right_are_offered(tmp_path, images, masks, first):
    lay_out(tmp_path, images, masks)
    assert typed_lines(ask(tmp_path))[0] == first


def test_a_flat_picture_beside_some_images_is_not_offered_for_masks_of_another_shape(tmp_path):
    lay_out(tmp_path, [f'pics/{n}.jpg' for n in range(6)], [f'pics/{n}_inst.png' for n in range(5)])
    for n in range(6):
        save(tmp_path / f'gt/{n}_gt.png', corner(n, n, 1, 48)[:30, :40])
    assert typed_lines(ask(tmp_path))[0] == 'image_pattern="{stem}.jpg" mask_pattern="{stem}_gt.png"'


def test_lists_of_patients_with_a_label_tell_the_split(tmp_path):
    """The label 1 is the name of 1.png, too."""
    lay_out(tmp_path, *([f'{k}/p{n // 3}/{n}.png' for n in range(18)] for k in ('images', 'masks')))
    for split, some in (('train', (0, 1, 2)), ('val', (3,)), ('test', (4, 5))):
        (tmp_path / f'{split}.csv').write_text('\n'.join(['patient,label', *(f'p{p},{p % 2}' for p in some)]))
    assert len(names_of(inspect(tmp_path)[1], 'test')) == 6


def test_folders_of_splits_are_no_tasks_and_tasks_keep_their_numbers(tmp_path):
    lay_out(tmp_path / 'a', [f'{s}/rgb/{n}.jpg' for s, some in (('train', range(6)), ('test', range(6, 9)))
                             for n in some], [f'masks/{s}ing2018/{n}.png' for s, some in
                                              (('train', range(6)), ('test', range(6, 9))) for n in some])
    assert 'several tasks' not in ' '.join(inspect(tmp_path / 'a')[1].notes)
    lay_out(tmp_path / 'b', [f'images/{n}.jpg' for n in range(12)],
            [f'masks/{"roads2018" if n < 6 else "water2019"}/{n}.png' for n in range(12)])
    assert 'in roads2018 and in water2019,' in ' '.join(inspect(tmp_path / 'b')[1].notes)


def test_drive_in_one_folder_is_offered_its_masks(tmp_path):
    names = [(s, n) for s, numbers in (('training', range(21, 26)), ('test', range(1, 6))) for n in numbers]
    lay_out(tmp_path, [f'{s}/{n:02d}_{s}.png' for s, n in names],
            [f'{s}/{n:02d}_{kind}.png' for s, n in names for kind in ('manual1', 'mask')])
    assert 'mask_pattern="{stem}manual1.png" skip_unpaired=True' in typed_lines(ask(tmp_path))


def test_other_numbers_among_the_images_do_not_undo_the_pairs(tmp_path):
    lay_out(tmp_path, [f'images/{c}_6.jpg' for c in 'abcdef'] + ['images/chart1.jpg', 'images/chart2.jpg'],
            [f'masks/{c}_0.png' for c in 'abcdef'])
    assert len(inspect(tmp_path, skip_unpaired=True)[1].pairs.images) == 6


def test_data_too_low_is_told_beside_a_pattern(tmp_path):
    lay_out(tmp_path, [f'images/{n}.png' for n in range(6)], [f'masks/{n}_m.png' for n in range(6)])
    assert 'lies beside it' in str(ask(tmp_path / 'images', mask_pattern='{stem}_m.png'))


def test_one_folder_called_images2_is_no_second_kind(tmp_path):
    lay_out(tmp_path, [f'images/p{p}/{n}.jpg' for p in (1, 2) for n in range(6)],
            [f'masks/p{p}/images{"2" * (p == 2)}/{n}.png' for p in (1, 2) for n in range(6)])
    assert len(inspect(tmp_path, images='images', masks='masks')[1].pairs.images) == 12


def test_masks_alone_are_not_offered_as_images(tmp_path):
    lay_out(tmp_path, [], [f'labels_v{v}/{k}/{n}.png' for v, k in ((1, 'ids'), (1, 'colors'), (2, 'ids'))
                           for n in range(6)])
    assert not [line for line in typed_lines(ask(tmp_path)) if 'masks=' in line]


def test_folders_of_masks_without_a_split_go_with_images_that_have_one(tmp_path):
    lay_out(tmp_path, [f'images/{"train" if n < 6 else "test"}/{n}.jpg' for n in range(9)],
            [f'masks/{n}/{part}.png' for n in range(9) for part in range(2)])
    data = inspect(tmp_path)[1]
    assert 'one folder per image' in data.pairs.rule and len(names_of(data, 'test')) == 3


def test_turned_copies_of_a_set_come_after_it(tmp_path):
    """Forks of zhixuhao/unet: five copies of each of 20 pairs, and figures of the README, for which the set is
    refused."""
    train = tmp_path / 'data/membrane/train'
    lay_out(train, [f'image/{n}.png' for n in range(8)], [f'label/{n}.png' for n in range(8)])
    lay_out(train, [f'aug/image_{n}_{k}.png' for n in range(8) for k in range(51, 56)],
            [f'aug/mask_{n}_{k}.png' for n in range(8) for k in range(51, 56)])
    lay_out(tmp_path, [f'img/{name}.png' for name in ('result', 'u-net', 'test')], [])
    lines = typed_lines(ask(tmp_path))
    assert lines == ['images="data/membrane/train/image" masks="data/membrane/train/label"',
                     'image_pattern="image{stem}.png" mask_pattern="mask{stem}.png"']


def test_results_of_a_program_among_the_masks_are_noted(tmp_path):
    """The test masks of ft1148137's U-Net are its own predictions."""
    for split, end in (('train', ''), ('val', '_predict')):
        lay_out(tmp_path / split, [f'images/{n}.png' for n in range(6)], [f'masks/{n}{end}.png' for n in range(6)])
    notes = inspect(tmp_path)[1].notes
    assert any('6 masks, such as ' in note and 'are results of a program' in note for note in notes)
    for n in range(6):                                                 # trained on, nothing is scored on them
        os.rename(tmp_path / f'train/masks/{n}.png', tmp_path / f'train/masks/{n}_predict.png')
        os.rename(tmp_path / f'val/masks/{n}_predict.png', tmp_path / f'val/masks/{n}.png')
    assert not any('of a program' in note for note in inspect(tmp_path)[1].notes)


def test_masks_that_are_all_named_as_results_are_no_doubt(tmp_path):
    lay_out(tmp_path, [f'images/{n}.png' for n in range(6)], [f'masks/{n}_predict.png' for n in range(6)])
    assert not any('of a program' in note for note in inspect(tmp_path)[1].notes)


def test_a_search_ends_by_the_work_of_its_process(tmp_path, monkeypatch):
    fill(tmp_path, [f'{where}/{n**2}{where}.png' for n, where in enumerate('abcdefgh')], [])
    pair, tries = train_unet.pair_roles, []
    monkeypatch.setattr(train_unet, 'pair_roles', lambda *args, **rest: tries.append(1) or pair(*args, **rest))
    monkeypatch.setattr(time, 'thread_time', itertools.count(0, 20).__next__)
    assert ' found in the time for it (data=FOLDER leaves fewer' in str(ask(tmp_path)) and len(tries) < 6


@pytest.mark.parametrize('images, masks, wanted', [
    ([f'enhanced/{n}.png' for n in range(40)] + [f'samples/photo/{n}.png' for n in range(4)],
     [f'manual/{n}.png' for n in range(40)] + [f'samples/gt/{n}.png' for n in range(4)],
     'images="enhanced" masks="manual"'),
    ([f'T1_enhanced/{n}.png' for n in range(40)] + [f'T1_plain/{n + 50}.png' for n in range(12)],
     [f'tumor/{n}.png' for n in range(40)], 'images="T1_enhanced" masks="tumor"'),
    ([f'mirror/{n}.png' for n in range(40)] + [f'example/{n + 50}.png' for n in range(3)],
     [f'truths/{n}.png' for n in range(40)] + [f'example_out/{n + 50}.png' for n in range(3)],
     'images="mirror" masks="truths"'),
    ([f'T1_enhanced/BraTS20_{n:03}.png' for n in range(40)] + [f'example/BraTS20_{n:03}.png' for n in range(50, 53)],
     [f'tumor/BraTS20_{n:03}.png' for n in range(40)] + [f'example_out/BraTS20_{n:03}.png' for n in range(50, 53)],
     'images="T1_enhanced" masks="tumor"')])
def test_a_set_named_as_enhanced_is_no_copy_of_a_few_examples(tmp_path, images, masks, wanted):
    lay_out(tmp_path, images, masks)
    assert typed_lines(ask(tmp_path))[0] == wanted
