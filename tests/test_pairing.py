"""Data: pairing. Which file is the mask of which image, what is asked where that is not clear, and the split.

Run: python -m pytest tests/test_pairing.py
"""
import csv
import itertools
import ntpath
import os
import posixpath
import re
import shlex
import shutil
from pathlib import Path, PureWindowsPath

import numpy as np
import PIL.Image
import pytest
import tifffile

import train_unet
from conftest import draw_set
from helpers import WORDS, ask, fill, inspect, mask_of, names_of, objects, offered, partners, save, split_sizes, typed
from helpers import typed_lines
from train_unet import DataError, resolve_config


# --- names and folders that pair ------------------------------------------------------


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
    ('folders in the names of masks', 'frames/clip{n}/0.jpg', 'masks/clip{n}_0.png', {}),
    ('folders in the names of images', 'images/a-{n}_0.jpg', 'masks/a/{n}/0.png', {}),
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


def test_folders_without_data_are_not_looked_for_in_the_demo_set(tmp_path, monkeypatch):
    """Given absolutely, they were found there: one's own images, in a run named demo-1, trained as the demo is."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(train_unet.ConfigError, match='images, masks: without data; type data=PATH too'):
        train_unet.find_pairs(resolve_config(None, {key: str(tmp_path / key) for key in ('images', 'masks')})[0])
    assert not os.path.exists(train_unet.DEMO_FOLDER)                  # nothing was drawn


def test_extensions_may_be_mixed(tmp_path):
    images = ['a.png', 'b.JPG', 'c.jpeg', 'd.bmp', 'e.tif', 'f.webp', 'g.jp2', 'h.j2k']
    masks = ['a.bmp', 'b.png', 'c.PNG', 'd.tiff', 'e.gif', 'f.png', 'g.jp2', 'h.j2k']
    fill(tmp_path / 'set', [f'images/{n}' for n in images], [f'masks/{n}' for n in masks])
    _, data = inspect(tmp_path / 'set')
    assert {Path(i).name: Path(m).name for i, m in partners(data, tmp_path / 'set').items()} == \
        dict(zip(images, masks))


def test_a_folder_for_testing_and_another_split_is_for_testing(tmp_path):
    """DAVIS and COCO have test-dev, which was trained on."""
    names = [f'{split}/{n}' for split in ('train', 'val', 'test-dev') for n in range(3)]
    fill(tmp_path, [f'images/{name}.png' for name in names], [f'masks/{name}.png' for name in names])
    assert split_sizes(inspect(tmp_path)[1]) == [3, 3, 3]


def test_folders_of_a_mac_and_of_windows_are_one(tmp_path):
    for folder, other in (('K\u00f6ln', 'Ko\u0308ln'), ('Rom', 'Rom')):
        fill(tmp_path, [f'images/{folder}/{n}.jpg' for n in range(3)], [f'masks/{other}/{n}.png' for n in range(3)])
    found = partners(inspect(tmp_path)[1], tmp_path)
    assert len(found) == 6 and found['images/K\u00f6ln/1.jpg'] == 'masks/Ko\u0308ln/1.png'
    for folder in ('K\u00f6ln', 'Rom'):
        names = [f'{folder}/{n}' for n in range(3)]
        fill(tmp_path / 'b', [f'images/{name}.jpg' for name in names], [f'masks/{name}.png' for name in names])
    (tmp_path / 'b/val.txt').write_text('Ko\u0308ln/1.jpg\nRom/2.jpg\n')
    assert sorted(names_of(inspect(tmp_path / 'b')[1], 'val')) == ['1', '2']


def test_names_of_a_mac_and_of_windows_are_one(tmp_path):
    images, masks = (['K\u00f6ln.jpg', 'Rom.jfif'], ['Ko\u0308ln.png', 'Rom.png'])
    fill(tmp_path / 'set', [f'images/{name}' for name in images[:1]], [f'masks/{name}' for name in masks])
    PIL.Image.new('RGB', (8, 8)).save(tmp_path / 'set/images/Rom.jfif', 'JPEG')
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {f'images/{a}': f'masks/{b}' for a, b in zip(images, masks)}


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


@pytest.mark.parametrize('folder', ['segm', 'segmaps', 'GTmaps'])
def test_more_names_of_folders_of_masks(tmp_path, folder):
    """DeepFashion, particles under an electron microscope, clouds."""
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'{folder}/{n}.png' for n in range(4)])
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_frames_with_annotations_are_images(tmp_path):
    """RUGD."""
    fill(tmp_path / 'set', [f'RUGD_frames-with-annotations/park/{n}.png' for n in range(4)],
         [f'RUGD_annotations/park/{n}.png' for n in range(4)])
    assert len(inspect(tmp_path / 'set')[1].pairs.images) == 4


def test_one_folder_named_images_holds_both(tmp_path):
    """Magnetic tiles: MT_Crack/Imgs/x.jpg and its mask MT_Crack/Imgs/x.png."""
    fill(tmp_path / 'set', [f'MT_{k}/Imgs/{k}{n}.jpg' for k in 'ab' for n in range(3)],
         [f'MT_{k}/Imgs/{k}{n}.png' for k in 'ab' for n in range(3)])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {f'MT_{k}/Imgs/{k}{n}.jpg': f'MT_{k}/Imgs/{k}{n}.png'
                                                for k in 'ab' for n in range(3)}


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


def test_what_a_rule_leaves_over_pairs_by_equal_stems(tmp_path):
    """Kaggle's chest X-rays: one hospital's masks are named like its images, those of the other end in _mask."""
    names = [f'CH_{n:03}' for n in range(9)], [f'MC_{n:03}' for n in range(4)]
    fill(tmp_path, [f'images/{name}.png' for name in sum(names, [])],
         [*(f'masks/{name}_mask.png' for name in names[0]), *(f'masks/{name}.png' for name in names[1])])
    _, data = inspect(tmp_path)
    assert len(data.pairs.images) == 13 and data.pairs.rule == 'names like {stem} and {stem}_mask and equal stems'
    pairs = [[Path(os.fsdecode(path)).stem.removesuffix('_mask') for path in paths]
             for paths in (data.pairs.images, data.pairs.masks)]
    assert pairs[0] == pairs[1]


def test_splits_that_are_named_otherwise_pair_each_by_a_rule_of_its_own(tmp_path):
    """DRIVE: 21_training.tif and 01_test.tif, but 21_manual1.gif and 01_manual1.gif."""
    made = [('training', range(21, 27)), ('test', range(1, 7))]
    fill(tmp_path / 'set', [f'{split}/images/{n:02}_{split}.tif' for split, numbers in made for n in numbers],
         [f'{split}/1st_manual/{n:02}_manual1.gif' for split, numbers in made for n in numbers])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == {
        f'{split}/images/{n:02}_{split}.tif': f'{split}/1st_manual/{n:02}_manual1.gif'
        for split, numbers in made for n in numbers}


def test_views_are_not_paired_with_the_masks_of_others(tmp_path):
    """images-0 belongs to mask-0, though the stems are the same."""
    fill(tmp_path / 'set', [f'{n:02}/images-{view}/{n}.png' for n in range(8) for view in (0, 1)],
         [f'{n:02}/mask-{view}/{n}.png' for n in range(8) for view in (0, 1)])
    _, data = inspect(tmp_path / 'set')
    pairs = partners(data, tmp_path / 'set')
    assert len(pairs) == 16 and all(image.replace('images', 'mask') == mask for image, mask in pairs.items())


# --- a folder for each image ----------------------------------------------------------


@pytest.mark.parametrize('folder', ['img_{n}_json', 'image_{n}', 'photo {n}', 'train_{n}'])
def test_a_folder_for_each_image_may_sound_like_images_masks_or_a_split(tmp_path, folder):
    """As labelme names them; the two pictures in each belong together."""
    pairs = {f'{folder}/img.png'.format(n=n): f'{folder}/label.png'.format(n=n) for n in range(12)}
    fill(tmp_path / 'set', [*pairs], [*pairs.values()])
    _, data = inspect(tmp_path / 'set')
    assert partners(data, tmp_path / 'set') == pairs


def test_a_folder_for_each_image_named_like_one_gets_its_line(tmp_path):
    """As labelme_json_to_dataset writes them."""
    for n in range(6):
        fill(tmp_path / 'set', [f'img_{n}_json/img.png'], [f'img_{n}_json/label.png', f'img_{n}_json/label_viz.png'])
    line = 'image_pattern="{stem}img.png" mask_pattern="{stem}label.png"'
    assert line in typed_lines(ask(tmp_path / 'set'))
    _, data = inspect(tmp_path / 'set', image_pattern='{stem}img.png', mask_pattern='{stem}label.png')
    assert partners(data, tmp_path / 'set') == {f'img_{n}_json/img.png': f'img_{n}_json/label.png' for n in range(6)}


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


# --- masks of one image in several files, united --------------------------------------


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


def dsb(folder, without):
    """Four images in the layout of DSB-2018; one of them has no masks."""
    for n in range(4):
        fill(folder, [f'id{n}/images/id{n}.png'], [])
        if n != without:
            objects(folder, [f'id{n}/masks/{n}a.png', f'id{n}/masks/{n}b.png'])
    return folder


def test_hidden_files_among_object_masks_are_ignored(tmp_path):
    """macOS leaves ._1.png beside 1.png; one of them is a sound image here, so that its use would show."""
    folder = dsb(tmp_path / 'set', None)
    save(folder / 'id1/masks/._1a.png', np.full((8, 8), 255))
    (folder / 'id2/masks/._2a.png').write_bytes(b'\0\5\x16\7')
    config, data = inspect(folder)
    for n in range(4):
        assert mask_of(data, config, f'id{n}').sum() == 16
    assert 'ignored 2 files, *.png: ._1a.png, ...' in data.notes


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


def test_folder_that_holds_the_image_too_is_not_united(tmp_path):
    """p1/scan.png beside p1/mask_a.png: the union of the folder would hold the scan itself."""
    for p in 'abc':
        fill(tmp_path / 'set', [f'p{p}/scan.png'], [f'p{p}/mask_a.png', f'p{p}/mask_b.png'])
    error = ask(tmp_path / 'set')
    assert error.title == 'images and masks do not pair' and 'mask_b.png' in str(error)
    _, data = inspect(tmp_path / 'set', image_pattern='sc{stem}.png', mask_pattern='m{stem}_b.png')
    assert partners(data, tmp_path / 'set') == {f'p{p}/scan.png': f'p{p}/mask_b.png' for p in 'abc'}


def test_kinds_of_masks_that_are_united_are_named(tmp_path):
    for n in range(4):
        fill(tmp_path / 'set', [f'id{n}/images/id{n}.png'], [f'id{n}/masks/{kind}.png' for kind in ('cup', 'disc')])
    _, data = inspect(tmp_path / 'set')
    assert data.pairs.rule == 'one folder per image, its masks united, such as cup and disc'
    _, data = inspect(tmp_path / 'set', mask_pattern='{stem}cup.png')
    assert partners(data, tmp_path / 'set') == {f'id{n}/images/id{n}.png': f'id{n}/masks/cup.png' for n in range(4)}


def test_classes_that_are_united_are_doubted_with_a_line_for_one_of_them(tmp_path):
    """Objects have names of their own; a class has the same in nearly every folder, be it masks/ or the image's."""
    for n in range(12):
        fill(tmp_path / 'a', [f'case_{n}/image.png'], [])
        objects(tmp_path / f'a/case_{n}/masks', ['liver.png', 'kidney.png', 'cyst.png'][n % 4 == 0:2 + n % 2])
        fill(tmp_path / 'b', [f'images/x{n}.png'], [])
        objects(tmp_path / f'b/masks/x{n}', ['left lung.png', 'right lung.png'])
        fill(tmp_path / 'c', [f'id{n}/images/id{n}.png'], [])
        objects(tmp_path / f'c/id{n}/masks', [f'nucleus_{k}.png' for k in range(3)] + ['other.png'])
        fill(tmp_path / 'd', [f'id{n}/images/id{n}.png'], [])          # a few names again, among objects of their own
        objects(tmp_path / f'd/id{n}/masks', ['rim.png', 'dirt.png', *(f'{chr(97 + n)}{k}.png' for k in 'abc')])
    for n in range(40):                                                # no name in more than a tenth of the folders
        fill(tmp_path / 'e', [f'id{n}/images/id{n}.png'], [])
        objects(tmp_path / f'e/id{n}/masks', [f'{chr(97 + n // 4)}{k}.png' for k in 'abc'])
    notes = {name: [note for note in inspect(tmp_path / name)[1].notes if 'united' in note] for name in 'abcde'}
    assert notes['e'] == [] and notes['a'][0].startswith('kidney and liver and cyst are united: one class, ')
    assert notes['b'] == ['left lung and right lung are united: one class, unless you draw them into one mask; for one '
                          'of them type mask_pattern="{stem}left lung.png"'] and not notes['c'] + notes['d']
    for name in 'ab':
        _, data = inspect(tmp_path / name, **typed(offered(notes[name][0], 'mask_pattern')))
        assert len(data.pairs.masks) == 12 and len({*map(os.path.basename, data.pairs.masks)}) == 1
        assert not [note for note in data.notes if 'united' in note]


@pytest.mark.parametrize('name', ['rater{k}.png', '{n}_rater{k}.png', '{k}.png'])
def test_masks_by_several_people_in_one_folder_are_doubted(tmp_path, name):
    """Objects may have the same names, and touch; drawings of one thing have most of their pixels in common."""
    for n in range(6):
        fill(tmp_path / 'set', [f'images/{n}.png'], [])
        for k in (1, 2):
            save(tmp_path / 'set/masks' / str(n) / name.format(n=n, k=k), np.pad(np.full((6, 6), 255), (k - 1, 3 - k)))
    note, = (note for note in inspect(tmp_path / 'set')[1].notes if 'united' in note)
    assert 'same places, as masks by several people do, or objects that overlap; for one of them type mask_p' in note
    _, data = inspect(tmp_path / 'set', **typed(offered(note, 'mask_pattern')))
    masks = [*map(os.fsdecode, data.pairs.masks)]
    assert masks == [str(tmp_path / 'set/masks' / str(n) / name.format(n=n, k=masks[0][-5])) for n in range(6)]
    for n in range(6):
        for k in (1, 2):
            save(tmp_path / 'set/masks' / str(n) / name.format(n=n, k=k), np.eye(8)[::3 - 2 * k] * 255)
    assert not [note for note in inspect(tmp_path / 'set')[1].notes if 'united' in note]


def test_classes_whose_names_begin_with_that_of_the_image_are_doubted_too(tmp_path):
    for n in range(12):
        fill(tmp_path / 'a', [f'images/{n}.png'], [])
        objects(tmp_path / f'a/masks/{n}', [f'{n}_car.png', f'{n}_road.png'])
        fill(tmp_path / 'b', [f'images/{n}.png'], [])
        objects(tmp_path / f'b/masks/{n}', [f'{n}_cell_{k}.png' for k in range(3)])
    a, b = ([note for note in inspect(tmp_path / name)[1].notes if 'united' in note] for name in 'ab')
    assert a[0].startswith(('car and road are united: one class', 'road and car are united: one class')) and not b
    _, data = inspect(tmp_path / 'a', **typed(offered(a[0], 'mask_pattern')))
    assert len(data.pairs.masks) == 12 and len({path.rpartition(b'_')[2] for path in data.pairs.masks}) == 1


@pytest.mark.parametrize('extra', ['mask_color', 'overlay', 'viz'])
def test_pictures_made_of_masks_are_not_united_with_them(tmp_path, extra):
    for n in range(6):
        fill(tmp_path / 'set', [f'id{n}/images/id{n}.png'], [f'id{n}/masks/{kind}.png' for kind in ('mask', extra)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines
    for line in lines:
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert partners(data, tmp_path / 'set') == {f'id{n}/images/id{n}.png': f'id{n}/masks/mask.png'
                                                    for n in range(6)}


def test_united_masks_are_those_of_the_pattern(tmp_path):
    for n in range(4):
        save(tmp_path / f'set/images/cell{n}.png', np.zeros((8, 8, 3)))
        objects(tmp_path / f'set/masks/cell{n}', ['obj_1.png', 'obj_2.png'])
        save(tmp_path / f'set/masks/cell{n}/preview.png', np.full((8, 8), 255))
    config, data = inspect(tmp_path / 'set', mask_pattern='obj_{stem}.png')
    assert mask_of(data, config, 'cell0').sum() == 16                  # two rows of eight


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


@pytest.mark.parametrize('side, key', [('images', 'image_pattern'), ('masks', 'mask_pattern')])
def test_a_file_there_twice_gets_the_ending_of_the_others(tmp_path, side, key):
    """For masks the only line offered was that of the one file with another ending."""
    fill(tmp_path, [f'images/{n}.png' for n in range(6)], [f'masks/{n}.png' for n in range(6)])
    (tmp_path / side / '1.png').with_suffix('.bmp').write_bytes((tmp_path / side / '1.png').read_bytes())
    assert key + '="{stem}.png"   (6 pairs)' in str(ask(tmp_path))


def test_masks_that_overlap_are_said_to_be_why_they_are_not_united(tmp_path):
    """Only "mask without an image" was said of each second one, which sounds like a matter of names."""
    fill(tmp_path, [f'images/{n}.png' for n in range(6)],
         [f'masks/{n}_mask{end}.png' for n in range(6) for end in ('', '_1')])
    assert 'these masks of one image show the same place, so they are not united' in str(ask(tmp_path))


def test_numbered_masks_of_other_images_are_not_united(tmp_path):
    """Where an image lacks its mask, where no word says mask, or where a file is saved twice."""
    fill(tmp_path / 'a', [f'{n}.png' for n in range(6)] + ['2_1.png'], [f'{n}_mask.png' for n in range(6)])
    objects(tmp_path / 'a', ['2_mask_1.png'])
    assert '2_mask_1.png' in str(ask(tmp_path / 'a')) and 'united' not in str(ask(tmp_path / 'a'))
    fill(tmp_path / 'b', [f'images/{n}.png' for n in range(6)], [f'masks/{n}.png' for n in range(6)])
    objects(tmp_path / 'b', ['masks/2_1.png'])
    assert 'mask without an image' in str(ask(tmp_path / 'b'))


def test_further_masks_are_united_though_an_image_without_one_begins_with_the_same_letters(tmp_path):
    """Of s1 was trained half, because s10 had no mask."""
    fill(tmp_path, [f'images/s{n}.png' for n in range(1, 13)], [])
    for n in range(1, 7):
        objects(tmp_path / 'masks', [f's{n}_mask.png', f's{n}_mask_1.png'])
    config, data = inspect(tmp_path, skip_unpaired=True)
    assert len(data.pairs.images) == 6 and mask_of(data, config, 's1')[:, 0].tolist() == [1, 1] + [0] * 6


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


def test_masks_of_other_patients_are_not_united(tmp_path):
    """Second offered was images="*/data/001" masks="*/masks/*", which gave patient 001 the masks of all."""
    for split, (patient, count) in itertools.product(('tr', 'vd'), ((1, 6), (2, 4), (3, 4))):
        for n in range(count):
            fill(tmp_path, [f'{split}/data/{patient:03d}/{n}_rgb.png'], [])
            save(tmp_path / f'{split}/masks/{patient:03d}/{n}_label.png', np.eye(8, k=patient, dtype=int))
    assert typed_lines(ask(tmp_path)) == ['images="*/data" masks="*/masks"']


def test_masks_of_several_folders_are_united_in_each_of_several_folders(tmp_path):
    """EndoVis: instrument_dataset_1/ground_truth/Left_Forceps_labels, the same names in every sequence."""
    data = tmp_path / 'results'                                        # which tells nothing of what is in it
    for sequence, n in itertools.product((1, 2), range(4)):
        folder = data / f'sequence_{sequence}'
        save(folder / f'left_frames/frame{n}.png', np.random.default_rng((sequence, n)).integers(0, 256, (16, 16, 3)))
        for side, tool in enumerate(['Grasper', 'Left_Forceps']):
            mask = np.zeros((16, 16), np.uint8)
            mask[2:6 + n, 8 * side:8 * side + 4 + sequence] = 255
            save(folder / f'ground_truth/{tool}_labels/frame{n}.png', mask)
    error = ask(data)
    united = [line for line in error.problems if 'masks united' in line]
    assert 'masks="sequence_*/ground_truth/*labels"   (8 pairs, masks united: one class' in united[0]
    _, found = inspect(data, **typed(united[0].split('   (')[0]))
    for image, mask in zip(*(map(os.fsdecode, paths) for paths in (found.pairs.images, found.pairs.masks))):
        parts = mask.split(train_unet.UNITED)
        assert {os.path.basename(part) for part in parts} == {os.path.basename(image)} and len(parts) == 2
        assert {Path(part).parents[2] for part in parts} == {Path(image).parents[1]}


def test_masks_of_one_thing_by_several_people_are_not_offered_to_be_united(tmp_path):
    fill(tmp_path / 'set', [f'img/{n}.png' for n in range(6)],
         [f'labels/{person}Mask/{n}.png' for n in range(6) for person in ('anna', 'bert')])
    assert typed_lines(ask(tmp_path / 'set')) == [f'images="img" masks="labels/{person}Mask"'
                                                  for person in ('anna', 'bert')]


# --- what is never paired -------------------------------------------------------------


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


def test_parts_of_a_name_that_changed_their_order_pair_nothing(tmp_path):
    """x0_y1 is not y0_x1."""
    cells = [(x, y) for x in range(4) for y in range(4)]
    fill(tmp_path, [f'images/x{x}_y{y}.png' for x, y in cells], [f'masks/y{y}_x{x}.png' for x, y in cells])
    assert '0 pairs found' in ask(tmp_path).problems


@pytest.mark.parametrize('mask', ['row{y}_col{x}', 'mask_y{y}_x{x}'])
def test_rows_and_columns_that_changed_their_order_pair_nothing(tmp_path, mask):
    """Tiles were paired crosswise, as all numbers occur."""
    cells = [(x, y) for x in range(4) for y in range(4)]
    fill(tmp_path, [f'images/tile_x{x}_y{y}.png' for x, y in cells],
         [f'masks/{mask.format(x=x, y=y)}.png' for x, y in cells])
    assert '0 pairs found' in ask(tmp_path).problems


def test_rows_and_columns_in_one_order_pair(tmp_path):
    cells = [(x, y) for x in range(4) for y in range(4)]
    fill(tmp_path, [f'images/tile_x{x}_y{y}.png' for x, y in cells], [f'masks/col{x}_row{y}.png' for x, y in cells])
    assert partners(inspect(tmp_path)[1], tmp_path) == {
        f'images/tile_x{x}_y{y}.png': f'masks/col{x}_row{y}.png' for x, y in cells}


@pytest.mark.parametrize('name', ['', 'img'])
def test_a_running_number_behind_the_number_of_the_image_pairs_nothing(tmp_path, name):
    """img10_2 is the third mask, of img10: most were paired with img2 and the like."""
    fill(tmp_path, [f'images/{name}{n}.png' for n in range(14)],
         [f'masks/{name}{n}_{place}.png' for place, n in enumerate(sorted(range(14), key=str))])
    assert 'do not pair' in ask(tmp_path).title


@pytest.mark.parametrize('mask', ['label2_{n:03}', 'mask_v2_{n}', 'class1_{n:03}'])
def test_a_number_that_all_masks_have_in_front_is_not_the_image_s(tmp_path, mask):
    fill(tmp_path, [f'images/img_{n}.png' for n in range(14)], [f'masks/{mask.format(n=n)}.png' for n in range(14)])
    assert partners(inspect(tmp_path)[1], tmp_path) == {
        f'images/img_{n}.png': f'masks/{mask.format(n=n)}.png' for n in range(14)}


def test_two_numbers_that_both_fit_pair_nothing(tmp_path):
    times = [3, 1, 4, 0, 2]
    fill(tmp_path, [f'images/frame_{n}_t{t}.png' for n, t in enumerate(times)],
         [f'masks/frame{n}_mask.png' for n in range(5)])
    assert '0 pairs found' in ask(tmp_path).problems


def test_an_image_is_never_its_own_mask(tmp_path):
    fill(tmp_path / 'set', [f'A{k}/{k}{n}.png' for k in '12' for n in range(4)], [])
    error = ask(tmp_path / 'set', images='A*', masks='A1', skip_unpaired=True)
    assert 'image and its mask at once' in str(error)
    assert 'masks="A' not in str(error)


# --- lines that pair, offered where several would -------------------------------------


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
     ['images="IMD*/*_Image" masks="IMD*/*_lesion"']),
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


def test_two_folders_of_images_are_asked_for(tmp_path):
    """Pre and post (or S1 and S2) are not one set, though only the masks have a telling name."""
    fill(tmp_path / 'set', [f'{s}/{n}_{s}.png' for n in range(3) for s in ('pre', 'post')],
         [f'labels/{n}_label.png' for n in range(3)])
    error = ask(tmp_path / 'set')
    for folder in ('pre', 'post'):
        line = offered(error, 'images="' + folder) + ' ' + offered(error, 'masks=')
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert len(data.pairs.images) == 3


def test_vessels_are_offered_and_not_the_fields_of_view_in_a_folder_named_mask(tmp_path):
    """HRF, with photographs, on which it depends that NumPy's bool adds as "or"."""
    folder = tmp_path / 'set'
    for n in range(12):
        save(folder / f'images/{n:02}_dr.jpg', np.random.default_rng(n).integers(0, 256, (64, 64, 3)))
        save(folder / f'manual1/{n:02}_dr.tif', np.eye(64) * 255)
        save(folder / f'mask/{n:02}_dr_mask.tif', np.eye(64) * 255)
    assert typed_lines(ask(folder)) == ['images="images" masks="manual1"']


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


def test_a_folder_of_masks_that_lacks_a_few_is_offered_beside_one_that_is_whole(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(12)],
         [f'{kind}/{n}.png' for kind, count in (('masks_a', 12), ('masks_b', 10)) for n in range(count)])
    assert typed_lines(ask(tmp_path / 'set')) == ['images="images" masks="masks_a"',
                                                  'images="images" masks="masks_b" skip_unpaired=True']


def test_a_file_is_of_the_pattern_that_says_more_of_it(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}_RGB.png' for n in range(6)], [f'images/{n}.png' for n in range(6)])
    line = 'image_pattern="{stem}_RGB.png" mask_pattern="{stem}.png"'
    assert line in typed_lines(ask(tmp_path / 'set'))
    _, data = inspect(tmp_path / 'set', **typed(line))
    assert partners(data, tmp_path / 'set') == {f'images/{n}_RGB.png': f'images/{n}.png' for n in range(6)}


def test_masks_of_the_same_kind_as_the_images_are_offered_first(tmp_path):
    """Each number is in every folder: normal_mask is of normal, not of abnormal."""
    kinds = [f'{split}set/{kind}' for split in ('train', 'test') for kind in ('normal', 'abnormal')]
    fill(tmp_path / 'set', [f'{kind}/{n}.png' for kind in kinds for n in range(6)],
         [f'{kind}_mask/{n}.png' for kind in kinds for n in range(6)])
    error = ask(tmp_path / 'set')
    lines = typed_lines(error)
    assert lines and 'left out' not in str(error)                      # all of the normal ones have masks
    for line in lines:
        _, data = inspect(tmp_path / 'set', **typed(line))
        assert all(os.path.dirname(mask) == f'{os.path.dirname(image)}_mask'
                   for image, mask in partners(data, tmp_path / 'set').items())


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


@pytest.mark.parametrize('kinds', [('Trout', 'Shrimp', 'Sea Bass'), ('Latin2', 'Latin14396', 'Syriaque341')])
def test_one_line_stands_for_folders_named_after_those_above(tmp_path, kinds):
    """A fish a folder: Trout/Trout with Trout/Trout GT; manuscripts with numbers (U-DIADS-Bib)."""
    fill(tmp_path / 'set', [f'{kind}/{kind}/{n:05}.png' for kind in kinds for n in range(4)],
         [f'{kind}/{kind} GT/{n:05}.png' for kind in kinds for n in range(4)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines == ['images="*/*" masks="*/* GT"']
    _, data = inspect(tmp_path / 'set', **typed(lines[0]))
    assert partners(data, tmp_path / 'set') == {f'{kind}/{kind}/{n:05}.png': f'{kind}/{kind} GT/{n:05}.png'
                                                for kind in kinds for n in range(4)}


def test_a_letter_inside_a_word_is_not_the_name_of_the_folder_above(tmp_path):
    fill(tmp_path / 'set', [f'a{k}/data{k}/{n}.png' for k in (1, 2) for n in range(4)],
         [f'a{k}/gt_x{k}/{n}.png' for k in (1, 2) for n in range(4)])
    assert typed_lines(ask(tmp_path / 'set')) == ['images="a*/data*" masks="a*/gt_x*"']


@pytest.mark.parametrize('image, mask', [('{0}', '{0}_mask'), ('{0} images', '{0} masks'), ('images {0}', 'GT_{0}')])
@pytest.mark.parametrize('name', ['{1}', '{0}_{1}'])
def test_kinds_in_folders_of_their_own_get_a_line_that_takes_them_together(tmp_path, image, mask, name):
    kinds = ('Rust', 'Blight', 'Leaf spot')
    paths = [[f'{side.format(kind)}/{name.format(kind, n)}.png' for kind in kinds for n in range(4)]
             for side in (image, mask)]
    fill(tmp_path / 'set', *paths)
    lines = typed_lines(ask(tmp_path / 'set'))
    together = f'images="{image.format("*")}" masks="{mask.format("*")}"'
    assert lines[:3] == [f'images="{image.format(kind)}" masks="{mask.format(kind)}"' for kind in ('Rust', 'Blight',
                                                                                                   'Leaf spot')]
    assert lines[3:] == [together]
    _, data = inspect(tmp_path / 'set', **typed(together))
    assert partners(data, tmp_path / 'set') == dict(zip(*paths))


def test_one_line_stands_for_the_same_folders_in_two(tmp_path):
    """Two sites, each with two kinds (FALLMUD); the folder of masks has another name in one of two splits (DDR)."""
    fill(tmp_path / 'FALLMUD', *([f'{site}/{kind}_{role}/{n}.png' for site in ('Cronin', 'Miller') for n in range(4)
                                  for kind in ('fascicle', 'aponeurosis')] for role in ('images', 'masks')))
    lines = typed_lines(ask(tmp_path / 'FALLMUD'))
    assert lines[:2] == [f'images="*/{kind}_images" masks="*/{kind}_masks"' for kind in ('fascicle', 'aponeurosis')]
    fill(tmp_path / 'DDR', [f'DDR/{split}/image/{n}.png' for split in ('train', 'valid') for n in range(4)],
         [f'DDR/{split}/{n}.png' for split in ('train/label/EX', 'train/label/HE', 'valid/segmentation label/EX',
                                               'valid/segmentation label/HE') for n in range(4)])
    _, data = inspect(tmp_path / 'DDR', **typed(typed_lines(ask(tmp_path / 'DDR'))[0]))
    assert split_sizes(data) == [4, 4, 0]


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


def test_masks_of_other_frames_do_not_crowd_out_those_that_are_meant(tmp_path):
    """NVIDIA's Replicator writes all kinds into one folder, a depth map as .npy among them."""
    for n in range(10):
        fill(tmp_path / 'set', [f'rgb_{n:04}.png'], [f'{kind}_segmentation_{n:04}.png'
                                                     for kind in ('semantic', 'instance')])
        np.save(tmp_path / f'set/distance_to_camera_{n:04}.npy', np.random.default_rng(n).random((8, 8)))
    assert 'mask_pattern="semantic_segmentation{stem}.png"' in str(ask(tmp_path / 'set'))


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


def test_a_folder_of_the_semantic_beats_one_of_the_instances(tmp_path):
    """KITTI's semantic segmentation: image_2/, semantic/, semantic_rgb/ and instance/, with images alone to test on."""
    for n in range(6):
        for split in ('training', 'testing'):
            save(tmp_path / f'{split}/image_2/{n}.png', np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
        for kind in ('semantic', 'semantic_rgb', 'instance'):
            save(tmp_path / f'training/{kind}/{n}.png', np.eye(32))
    assert typed_lines(ask(tmp_path)) == ['images="training/image_*" masks="training/semantic"',
                                          'images="training/image_*" masks="training/semantic_rgb"']


def test_large_files_are_not_decoded_for_a_guess(tmp_path, monkeypatch):
    """Each would take gigabytes, and the time in which the other lines are tried."""
    kinds = 'images', 'masks_a', 'masks_b'
    fill(tmp_path / 'set', [], [f'{kind}/{n}.png' for kind in kinds for n in range(4)])
    monkeypatch.setattr(train_unet, 'read_header', lambda *_: (5000, 5000, 'L'))
    monkeypatch.setattr(train_unet, 'read_mask', None)
    assert typed_lines(ask(tmp_path / 'set')) == ['images="images" masks="masks_a"', 'images="images" masks="masks_b"']


@pytest.mark.parametrize('image, mask, told', [
    ('frames/clip{c}/{n:04}.jpg', 'masks/clip{c}_{n:04}_mask.png', ['mask_pattern="{stem}_mask.png"']),
    ('frames/clip{c}/f_{n}.jpg', 'masks/clip{c}-{n}.png', ['images="frames/clipA" masks="masks" skip_unpaired=True'])])
def test_frames_of_one_clip_get_no_masks_of_another(tmp_path, image, mask, told):
    """Of the second, clipB was offered with the masks of clipA."""
    for c, n in itertools.product('AB', range(6)):
        save(tmp_path / image.format(c=c, n=n), np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        save(tmp_path / mask.format(c=c, n=n), np.eye(9))
    lines = typed_lines(ask(tmp_path))
    assert lines == told
    pairs = partners(inspect(tmp_path, **typed(lines[0]))[1], tmp_path)
    assert pairs and all(re.search('clip.', image)[0] == re.search('clip.', mask)[0] for image, mask in pairs.items())


@pytest.mark.parametrize('image, mask, drawn, has_lines', [
    ('{c}/images/slice{n}.png', 'masks/{c}_{n}.png', 2, True), ('images/{c}_{n:03}.png', 'gt/{c}_{n}.png', 3, False),
    ('rgb/{n}_{c}.png', 'masks/{c}/{n}.png', 2, True), ('{c}/images/x_{n}.png', 'labels/{c}/x_{n}.png', 3, True),
    ('{c}/{c}{n:02}.png', '{c}/labels/{c}{n:02}.png', 2, True),
    ('rgb/{c}_{n}_t0.png', 'masks/{c}_{n:03}.png', 2, False)])
@pytest.mark.parametrize('films', [('Lima', 'Oslo', 'Rome'), ('s1_left', 's1_right', 's2_left')])
def test_no_line_pairs_the_images_of_one_film_with_the_masks_of_another(tmp_path, image, mask, drawn, has_lines, films):
    """One frame has no mask, nor has any of the films that are not drawn. Oslo/images/slice0 was offered Lima_0."""
    frames = [(c, n) for c in films for n in range(8)]
    fill(tmp_path, [], [mask.format(c=c, n=n) for c, n in frames if c in films[:drawn] and (c, n) != (films[0], 5)])
    for number, (c, n) in enumerate(frames):
        save(tmp_path / image.format(c=c, n=n), np.random.default_rng(number).integers(0, 256, (8, 8, 3)))
    lines, right = typed_lines(ask(tmp_path)), {image.format(c=c, n=n): mask.format(c=c, n=n) for c, n in frames}
    assert bool(lines) == has_lines
    for line in lines:
        assert partners(inspect(tmp_path, **typed(line))[1], tmp_path).items() <= right.items()


@pytest.mark.parametrize('files, image, mask, is_told', [
    ('7_0.jpg 7_6.jpg 7_0_mask.png', '7_6.jpg', '7_0_mask.png', True),          # 7_0.jpg has that one
    ('7_0.jpg 7_6.jpg 7_0_mask.png', '7_0.jpg', '7_0_mask.png', False),
    ('1/img_3.png 3/img_1.png masks/1/3.png masks/3/1.png', '1/img_3.png', 'masks/1/3.png', False),    # frame 3
    ('photo/1.png image/1.png masks/1_image.png', 'photo/1.png', 'masks/1_image.png', False),     # no film is 'image'
    ('Rome/1.png Oslo/1.png Lima/1.png masks/Lima_1.png', 'Rome/1.png', 'masks/Lima_1.png', True)])
def test_names_tell_that_a_mask_is_of_another_image(tmp_path, files, image, mask, is_told):
    is_of_another = train_unet.other_images(tmp_path, [posixpath.split(file) for file in files.split()])
    assert bool(is_of_another(str(tmp_path / image), str(tmp_path / mask))) == is_told


def test_masks_named_after_their_own_folder_are_offered(tmp_path):
    """As if they were of pictures in parts/, they got no line."""
    fill(tmp_path, [f'{kind}/{n}.png' for kind in ('rgb', 'depth') for n in range(6)],
         [f'parts/{n}_parts.png' for n in range(6)])
    assert 'images="rgb" masks="parts"' in typed_lines(ask(tmp_path))


@pytest.mark.parametrize('image, mask', [
    ('images/vid{c}_{n:03}.jpg', 'masks/vid{c}_{n:03}_mask.png'), ('images/vid{c}_{n}.png', 'masks/vid{c}_{n}.png'),
    ('images/vid{c}_frame{n:03}.jpg', 'masks/vid{c}_mask{n:03}.png'), ('vid{c}_{n:03}.jpg', 'vid{c}_{n:03}_mask.png'),
    ('images/{c}_{n}.png', 'masks/{c}_mask_{n}.png'), ('vid{c}/images/{n:03}.png', 'vid{c}/masks/{n:03}.png')])
def test_one_annotated_frame_of_a_film_lends_its_mask_to_no_other(tmp_path, image, mask):
    """Frame 6 was offered with the mask of frame 0, before the line that leaves out frames without a mask."""
    for c, n in itertools.product(range(1, 6), range(10)):
        save(tmp_path / image.format(c=c, n=n), np.random.default_rng(9 * c + n).integers(0, 256, (9, 9, 3)))
        if not n:
            save(tmp_path / mask.format(c=c, n=n), np.eye(9))
    line, = typed_lines(ask(tmp_path))
    assert line.endswith('skip_unpaired=True')
    pairs = partners(inspect(tmp_path, **typed(line))[1], tmp_path)
    assert pairs == {image.format(c=c, n=0): mask.format(c=c, n=0) for c in range(1, 6)}


@pytest.mark.parametrize('image, mask', [
    ('images/p3/{n}.png', 'masks/p4/{n}.png'), ('images/p3_{n}.png', 'masks/p4_{n}.png')])
def test_images_of_one_patient_get_no_masks_of_another(tmp_path, image, mask):
    fill(tmp_path, [image.format(n=n) for n in range(4)], [mask.format(n=n) for n in range(4)])
    assert '0 pairs found' in ask(tmp_path).problems
    fill(tmp_path, [f'train/images/p1_{n}.png' for n in range(6)], [f'train/masks/p1_{n}.png' for n in range(6)])
    fill(tmp_path, ['val/images/scan_17.png'], ['val/masks/scan_19.png'])
    assert 'image without a mask: ' + str(tmp_path / 'val/images/scan_17.png') in ask(tmp_path).problems


@pytest.mark.parametrize('images, masks', [
    (['images/case{}/0.png'], ['labels/case{}_mask/0.png']), (['images/img{}.png'], ['masks/img{}_mask/a.png']),
    (['images/img{}.png'], ['masks/img{}_mask/a.png', 'masks/img{}_mask/b.png']),
    (['images/00{}.png'], ['masks/00{}_mask_1.png', 'masks/00{}_mask_2.png'])])
def test_a_word_for_masks_is_no_part_of_what_files_and_folders_share(tmp_path, images, masks):
    for n in range(1, 5):
        for name in images:
            save(tmp_path / name.format(n), np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        for row, name in enumerate(masks):
            save(tmp_path / name.format(n), np.eye(9)[row] * np.eye(9)[n][:, None])
    _, data = inspect(tmp_path)
    number = lambda path: re.findall(r'[1-4]', os.path.relpath(path, tmp_path))[0]
    assert [number(os.fsdecode(image)) for image in data.pairs.images] == ['1', '2', '3', '4']
    assert all(number(os.fsdecode(mask).split(train_unet.UNITED)[0]) == str(n)
               for n, mask in enumerate(data.pairs.masks, 1))
    assert data.classes[1][0] == 4 * len(masks)


def test_several_images_of_a_case_pair_with_those_of_its_folder_of_masks(tmp_path):
    pairs = {f'images/case{c}/{n}.png': f'labels/case{c}_mask/{n}.png' for c in range(1, 3) for n in range(3)}
    fill(tmp_path, pairs, pairs.values())
    assert partners(inspect(tmp_path)[1], tmp_path) == pairs


def test_numbered_folders_of_images_go_with_masks_in_one_folder(tmp_path):
    pairs = {f'images/part{n // 5}/{n}.png': f'masks/{n}.png' for n in range(9)}
    fill(tmp_path, pairs, pairs.values())
    assert partners(inspect(tmp_path)[1], tmp_path) == pairs


@pytest.mark.parametrize('image, mask', [
    ('images/512/{n}.png', 'masks/256/{n}.png'), ('images/20x/{n}.png', 'masks/v2/{n}.png'),
    ('images/part1/{n}.png', 'masks/all/{n}.png'), ('train/images/512/{n}.png', 'train/masks/256/{n}.png'),
    ('images/rgb8_{n}.png', 'masks/mask1_{n}.png'), ('images/week1_{n}.png', 'masks/annotator2_{n}.png')])
def test_numbers_that_name_no_patient_do_not_part_masks_from_their_images(tmp_path, image, mask):
    """Sizes, bits, versions and people who draw."""
    pairs = {image.format(n=n): mask.format(n=n) for n in range(9)}
    fill(tmp_path, pairs, pairs.values())
    assert partners(inspect(tmp_path)[1], tmp_path) == pairs


def test_a_share_for_validation_that_is_used_is_not_told_to_do_nothing(small_set):
    assert not [note for note in inspect(small_set, val_fraction=0.4)[1].notes if 'no effect' in note]


def test_folders_typed_beside_a_list_file_are_told_to_do_nothing(small_set):
    rows = [f'images/{path.name},masks/{path.name}' for path in small_set.glob('images/*')]
    (small_set / 'list.csv').write_text('\n'.join(['image,mask', *rows]))
    notes = inspect(small_set / 'list.csv', images='scans', masks='labels', mask_pattern='{stem}')[1].notes
    assert [note for note in notes if 'no effect' in note] == [
        f'{key}: no effect, the list names the files' for key in ('images', 'masks')]


def test_names_with_more_numbers_than_those_of_the_masks_are_asked_about(tmp_path):
    """Not one of these is known to be of the other, and that is told in words."""
    fill(tmp_path, [f'images/{n}_20_40.png' for n in range(3, 7)], [f'masks/{n}_5.png' for n in range(3, 7)])
    assert '0 pairs found' in ask(tmp_path).problems


@pytest.mark.parametrize('image, mask, sound, is_told', [
    ('images/{n}.png', 'masks/{n}.png', 'images/ok{n}.png', True), ('NG/b{n}.png', 'GT/b{n}.png', 'OK/a{n}.png', True),
    ('rgb/{n}.png', 'drawn/{n}.png', None, False)])
def test_what_images_without_an_object_need_is_told_where_they_are_left_out(tmp_path, image, mask, sound, is_told):
    for n in range(6):
        save(tmp_path / image.format(n=n), np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        save(tmp_path / mask.format(n=n), np.eye(9))
        if sound:
            save(tmp_path / sound.format(n=n), np.random.default_rng(99 + n).integers(0, 256, (9, 9, 3)))
    error = ask(tmp_path)
    assert typed_lines(error)
    assert ('those that show nothing to find can be learnt from' in str(error)) == is_told


@pytest.mark.parametrize('counts, is_told', [((2, 2, 2, 2), True), ((2, 1, 3, 2), False),
                                               ((2, 1, 2, 2), False)])
def test_masks_of_the_same_numbers_for_each_image_are_united_with_a_word(tmp_path, counts, is_told):
    """Objects are more here and fewer there; classes and people are as many everywhere."""
    for n, count in enumerate(counts):
        save(tmp_path / f'images/img{n}.png', np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        for k in range(count):
            save(tmp_path / f'masks/img{n}_label_{k}.png', np.eye(9)[k] * np.eye(9)[n][:, None])
    notes = [note for note in inspect(tmp_path)[1].notes if 'take one kind' in note]
    assert bool(notes) == is_told
    if is_told:
        _, data = inspect(tmp_path, **typed(offered(notes[0], 'mask_pattern=')))
        assert data.classes[1][0] == 4 and not [note for note in data.notes if 'take one kind' in note]


@pytest.mark.parametrize('kinds, told', [(('left', 'right'), 'masks united: one class)'),
                                         (('road', 'sky'), 'masks united: one class, unless you draw them into one')])
@pytest.mark.parametrize('images, masks', [('images/{}.jpg', 'masks/{}_{}.png'), ('all/{}.jpg', 'all/{}_{}.png'),
                                           ('images/{}.jpg', 'masks/{}_{}.npy')])
def test_masks_of_several_kinds_may_be_united_by_a_star(tmp_path, images, masks, kinds, told):
    for n in range(9):
        save(tmp_path / images.format(f'p{n}'), np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        for row, kind in enumerate(kinds):
            save(tmp_path / masks.format(f'p{n}', kind), np.eye(9)[:, [n]] * np.eye(9)[row] * 255)
    line, = [line for line in ask(tmp_path).problems if '{stem}_*.' in line]
    assert told in line
    _, data = inspect(tmp_path, **typed(line.strip().split('   (')[0]))
    assert len(data.pairs.images) == 9 and data.classes[1] == (18, 9)


def test_masks_of_several_kinds_that_show_the_same_place_get_no_star(tmp_path):
    for n in range(9):
        save(tmp_path / f'images/{n}.jpg', np.random.default_rng(n).integers(0, 256, (9, 9, 3)))
        save(tmp_path / f'masks/{n}_anna.png', np.eye(9))
        save(tmp_path / f'masks/{n}_bert.png', np.eye(9))
    lines = typed_lines(ask(tmp_path))
    assert len(lines) == 2 and not any('*' in line for line in lines)


def test_a_star_in_a_pattern_stands_for_anything(tmp_path):
    """A time stamp in the names of the images, for one."""
    pairs = {f'images/case{n}_2024-01-0{n}.jpg': f'masks/case{n}.png' for n in range(1, 4)}
    fill(tmp_path, pairs, pairs.values())
    _, data = inspect(tmp_path, image_pattern='{stem}_*.jpg')
    assert partners(data, tmp_path) == pairs


def test_images_without_a_mask_do_not_hide_how_the_others_pair(tmp_path):
    """ACDC's driving scenes: each has a reference image without a mask, and so have all of the test split."""
    for number, split in enumerate(3 * ('test', 'train', 'val')):
        film = f'{number:04}'
        for name in (f'{split}/G{film}/G{film}_000_rgb_anon', f'{split}_ref/G{film}/G{film}_000_rgb_ref_anon'):
            save(tmp_path / f'rgb_anon/fog/{name}.png', np.random.default_rng(number).integers(0, 256, (9, 9, 3)))
        for kind in ('invIds', 'labelIds') if split != 'test' else ():
            save(tmp_path / f'gt/fog/{split}/G{film}/G{film}_000_gt_{kind}.png', np.eye(9, dtype=np.uint8))
    line = 'image_pattern="{stem}rgb_anon.png" mask_pattern="{stem}gt_labelIds.png"'
    assert line in typed_lines(ask(tmp_path))
    partner = partners(inspect(tmp_path, **typed(line))[1], tmp_path)
    assert len(partner) == 6 and all(image.replace('rgb_anon', 'gt', 1).replace('rgb_anon.', 'gt_labelIds.') == mask
                                     for image, mask in partner.items())


def test_a_training_offers_six_lines_and_says_how_many_more_there_are(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(4)],
         [f'masks_{kind}/{n}.png' for kind in 'abcdefgh' for n in range(4)])
    *lines, more, _ = ask(tmp_path).problems
    assert len([line for line in lines if line.startswith('    ')]) == 6 and more == '... and 2 more'
    assert all(line.startswith('    ') for line in more.hidden) and len(more.hidden) == 2     # which check shows


# --- lines that are not offered -------------------------------------------------------


def test_predictions_are_not_offered_where_there_are_images(tmp_path):
    fill(tmp_path / 'set', [f'xrays/{n}.png' for n in range(8)] + [f'predictions/{n}.png' for n in range(12)],
         [f'masks/{n}.png' for n in range(12)])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert any('images="xrays" masks="masks"' in line for line in lines) and 'predictions' not in ' '.join(lines)


def test_overlays_are_not_offered_as_images(tmp_path):
    """They show the truth."""
    fill(tmp_path / 'set', [f'{n}.png' for n in range(9)], [f'{n}_gt.png' for n in range(9)])
    fill(tmp_path / 'set', [f'{n}_overlay.png' for n in range(9)], [])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert lines and not [line for line in lines if 'overlay' in line.split(' mask')[0]]


def test_no_mask_is_offered_as_an_image_where_there_are_photographs(tmp_path):
    """The Dresden set of surgery: photographs and masks in one folder, more masks by each rater below."""
    for n in range(6):
        place = tmp_path / f'{n // 2:02}'
        save(place / f'image{n % 2:02}.png', np.random.default_rng(n).integers(0, 256, (32, 32, 3)))
        for folder in ('', 'anno_1', 'anno_2', 'merged'):
            save(place / folder / f'mask{n % 2:02}.png', np.eye(32) * 255)
    assert not typed_lines(ask(tmp_path))


def test_pictures_of_another_shape_are_not_offered_as_masks(tmp_path):
    """Photographs of the front and of the side of cars, all without a mask."""
    draw = np.random.default_rng(0)
    for n in range(6):
        for folder, shape in (('front', (40, 40, 3)), ('side', (40, 120, 3))):
            save(tmp_path / f'set/{folder}/car_{n}.png', draw.integers(0, 256, shape))
    assert typed_lines(ask(tmp_path / 'set')) == []


def test_photographs_are_not_offered_as_masks(tmp_path):
    """Both lines pair everything; what the files hold tells which of them is right."""
    draw = np.random.default_rng(0)
    for n in range(6):
        photo = draw.integers(0, 256, (40, 40, 3))
        save(tmp_path / f'set/1/s{n}.png', photo)
        save(tmp_path / f'set/2/s{n}.png', np.arange(1600).reshape(40, 40) % 40 // 20 * 255)
    assert typed_lines(ask(tmp_path / 'set')) == ['images="1" masks="2"']


def test_photographs_are_never_offered_as_masks_of_each_other(tmp_path):
    """A folder of photographs alone, whose names differ in a digit."""
    fill(tmp_path / 'set', [f'train/p{n:03}.jpg' for n in range(30)], [])
    assert not typed_lines(ask(tmp_path / 'set'))


def test_pictures_of_the_masks_are_not_offered_as_masks(tmp_path):
    for folder, prefix in (('rawimages', ''), ('groundtruth', ''), ('visualized_groundtruth', 'Visualized_')):
        names = [f'dataset/{folder}/{prefix}{n}.png' for n in range(5)]
        fill(tmp_path, *((names, []) if 'raw' in folder else ([], names)))
    error = ask(tmp_path)
    assert '    images="dataset/rawimages" masks="dataset/groundtruth"   (5 pairs)' in error.problems


def test_the_first_of_several_kinds_of_masks_is_not_offered_for_all(tmp_path):
    """skip_unpaired alone would take the colours, which come first in the alphabet."""
    fill(tmp_path / 'set', [f'rgb/cam0_rgb_{n:04}.png' for n in range(12)],
         [f'gt/cam0_gt_{kind}_{n:04}.png' for kind in ('color', 'labels') for n in range(12)])
    assert typed_lines(ask(tmp_path / 'set')) == []


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


def test_species_are_not_offered_the_masks_of_others(tmp_path):
    """Every species has pictures of the same names: only its own folder of masks belongs to it."""
    for kind in ('Trout', 'Shrimp', 'Bream'):
        fill(tmp_path / 'set', [f'Fish/{kind}/{kind}/{n}.png' for n in range(4)],
             [f'Fish/{kind}/{kind} GT/{n}.png' for n in range(4)])
    lines = re.findall('images="(.*?)" masks="(.*?)"', str(ask(tmp_path / 'set')))
    assert lines and all(mask == f'{image} GT' for image, mask in lines)


@pytest.mark.parametrize('split', [('TR', 'TE'), ('train', 'test')])
def test_images_of_training_are_never_offered_with_masks_of_the_test(tmp_path, split):
    """DUTS: DUTS-TR/DUTS-TR-Image, DUTS-TE/DUTS-TE-Mask; the same names in both."""
    for s in split:
        fill(tmp_path / 'set', [f'{s}/{s}-photo/{n}.jpg' for n in range(9)],
             [f'{s}/{s}-{kind}/{n}.png' for n in range(9) for kind in ('truth', 'labels')])
    lines = typed_lines(ask(tmp_path / 'set'))
    assert len(lines) >= 2
    for line in lines:
        for image, mask in partners(inspect(tmp_path / 'set', **typed(line))[1], tmp_path / 'set').items():
            assert image.split('/')[0] == mask.split('/')[0]


# --- folders and patterns that were typed ---------------------------------------------


@pytest.mark.parametrize('kind', ['mask', 'seg'])
def test_a_pattern_for_masks_counts_in_a_folder_named_images_too(tmp_path, kind):
    """It picked x_seg.png, whatever was typed; a pattern that no file fits is refused."""
    fill(tmp_path, [f'images/{n}.png' for n in range(6)],
         [f'images/{n}_{kind}.png' for n in range(6) for kind in ('mask', 'seg')])
    _, data = inspect(tmp_path, mask_pattern=f'{{stem}}_{kind}.png', skip_unpaired=True)
    assert {os.path.basename(os.fsdecode(mask)) for mask in data.pairs.masks} == {f'{n}_{kind}.png' for n in range(6)}
    assert 'found 18 images and 0 masks' in str(ask(tmp_path, mask_pattern='{stem}_typo.png'))


def test_a_typed_pattern_that_fits_images_and_masks_alike_is_not_dropped(tmp_path):
    """Of week 1 alone; all twelve were trained on, week 2 among them."""
    names = [f'w{week}_{n}' for week in (1, 2) for n in range(6)]
    fill(tmp_path, [f'{name}_image.png' for name in names], [f'{name}_mask.png' for name in names])
    ask(tmp_path, mask_pattern='w1_{stem}.png')
    lines = typed_lines(ask(tmp_path, mask_pattern='{stem}_msak.png'))
    assert lines == ['mask_pattern="{stem}mask.png"']


def test_a_pattern_that_fits_images_too_counts_where_no_folder_tells(tmp_path):
    """images/0.png and ids/0.png: {stem}.png fits both."""
    fill(tmp_path, [f'images/{n}.png' for n in range(6)], [f'ids/{n}.png' for n in range(6)])
    _, data = inspect(tmp_path, mask_pattern='{stem}.png')
    assert {os.path.basename(os.path.dirname(os.fsdecode(mask))) for mask in data.pairs.masks} == {'ids'}


def test_second_annotator_is_left_out_by_patterns(tmp_path):
    """CHASE: x.jpg, x_1stHO.png and x_2ndHO.png in one folder."""
    fill(tmp_path / 'set', [f'{n}.jpg' for n in range(3)],
         [f'{n}_{who}HO.png' for n in range(3) for who in ('1st', '2nd')])
    _, data = inspect(tmp_path / 'set', image_pattern='{stem}.jpg', mask_pattern='{stem}_1stHO.png')
    assert partners(data, tmp_path / 'set') == {f'{n}.jpg': f'{n}_1stHO.png' for n in range(3)}


def test_stars_in_folders_keep_split_and_patient(tmp_path):
    """What * stands for may be a split or tell files of one name apart."""
    names = [f'{s}/p{n}' for n, s in enumerate(['train', 'val', 'train', 'val'])]
    fill(tmp_path / 'set', [f'{n}/scan/1.png' for n in names], [f'{n}/drawn/1.png' for n in names])
    _, data = inspect(tmp_path / 'set', images='*/p*/scan', masks='*/p*/drawn')
    assert partners(data, tmp_path / 'set') == {f'{n}/scan/1.png': f'{n}/drawn/1.png' for n in names}
    assert len(data.pairs.rows('val')) == 2


def test_advice_stays_with_the_folders_that_were_typed(tmp_path):
    fill(tmp_path / 'set', [f'rgb/{n}.png' for n in range(10)] + [f'infrared/{n}.png' for n in range(12)],
         [f'masks/{n}.png' for n in range(12)])
    lines = typed_lines(ask(tmp_path / 'set', images='rgb', masks='masks'))
    assert lines == ['skip_unpaired=True']


def test_folders_inside_the_typed_one_are_named_beside_it(tmp_path):
    fill(tmp_path / 'set', [f'pictures/{kind}{n}.png' for kind in ('', 'imgs_of_etis/') for n in range(4)],
         [f'masks/{n}.png' for n in range(4)])
    assert 'the folder itself, imgs_of_etis' in str(ask(tmp_path / 'set', images='pictures', masks='masks'))


def test_a_dot_names_what_lies_in_the_top_folder_itself(tmp_path):
    fill(tmp_path / 'set', [*(f'{n}.png' for n in range(9)), *(f'composite_images/{n}.png' for n in range(4))],
         [f'annot/{n}.png' for n in range(9)])
    assert '    images="." masks="annot"   (9 pairs)' in str(ask(tmp_path / 'set'))
    for top in ('.', './'):                                            # ./ is what a shell completes
        _, data = inspect(tmp_path / 'set', images=top, masks='annot')
        assert len(data.pairs.images) == 9
        assert 'ignored 4 files, outside of images= and masks=: 0.png, ...' in data.notes


def test_a_dot_beside_the_picture_of_a_readme_names_what_lies_below(tmp_path):
    fill(tmp_path / 'set', ['overview.png', *(f'{year}/{n}.png' for year in (2019, 2020) for n in range(4))],
         [f'annot/{year}/{n}.png' for year in (2019, 2020) for n in range(4)])
    _, data = inspect(tmp_path / 'set', images='.', masks='annot', skip_unpaired=True)
    assert len(data.pairs.images) == 8


def test_what_lies_outside_the_folders_that_were_typed_is_told(tmp_path):
    fill(tmp_path, [f'{kind}/images/{n}.png' for kind in ('a', 'b') for n in range(4)],
         [f'{kind}/masks/{n}.png' for kind in ('a', 'b') for n in range(4)])
    notes = inspect(tmp_path, images='a/images', masks='a/masks')[1].notes
    assert 'ignored 8 files, outside of images= and masks=: 0.png, ...' in notes
    assert not any('outside of' in note for note in inspect(tmp_path, images='*/images', masks='*/masks')[1].notes)


# --- files without a partner ----------------------------------------------------------


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


def test_images_left_over_are_offered_to_be_skipped(tmp_path):
    """VOC: many more images than masks, and masks of two kinds."""
    fill(tmp_path / 'voc', [f'JPEGImages/{n}.jpg' for n in range(9)],
         [f'{kind}/{n}.png' for n in range(4) for kind in ('SegmentationClass', 'SegmentationObject')])
    assert typed_lines(ask(tmp_path / 'voc')) == [f'images="JPEGImages" masks="Segmentation{kind}" skip_unpaired=True'
                                                  for kind in ('Class', 'Object')]


def test_a_few_masks_of_many_images_may_be_all_that_is_meant(tmp_path):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(60)], [f'masks/{n}.png' for n in range(2)])
    assert 'skip_unpaired=True' in typed_lines(ask(tmp_path / 'set'))


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


def test_test_images_in_a_folder_of_their_own_are_left_out_too(tmp_path):
    """data/images with data/masks, and test/images, whose masks nobody has: the split stands on one side only."""
    fill(tmp_path, [f'{top}/images/{top}{n}.png' for top in ('data', 'test') for n in range(4)],
         [f'data/masks/data{n}.png' for n in range(4)])
    data = inspect(tmp_path)[1]
    assert len(data.pairs.images) == 4 and len(data.pairs.rows('val')) == 1
    assert 'ignored 4 files, images of the test split, which has no masks: test0.png, ...' in data.notes


def test_test_images_whose_masks_have_other_names_are_named(tmp_path):
    """A mask is left over that may be theirs."""
    fill(tmp_path, [f'{split}/images/{split}{n}.png' for split in ('train', 'test') for n in range(4)],
         [*(f'train/masks/train{n}.png' for n in range(4)), 'test/masks/other.png'])
    assert f'image without a mask: {tmp_path}/test/images/test0.png' in str(ask(tmp_path))


def test_masks_are_not_parted_where_images_was_typed(tmp_path):
    """images= holds nothing that can be read: the folder of the masks does not stand in for it."""
    fill(tmp_path, [f'labels/cell{n}.png' for n in range(4)], [f'labels/cell{n}_mask.png' for n in range(4)])
    (tmp_path / 'scans').mkdir()
    (tmp_path / 'scans/0.raw').write_bytes(b'0')
    assert 'found 0 images and 8 masks' in str(ask(tmp_path, images='scans', masks='labels'))
    assert 'found 8 images and 0 masks' in str(ask(tmp_path, images='labels', masks='scans'))


def test_files_typed_as_images_or_masks_are_refused(tmp_path):
    """masks="anno/*.png" named no folder, so older masks beside the images were taken in silence."""
    masks = [f'{name}.png' for n in range(4) for name in (f'anno/{n}', f'imgs/{n}_mask')]
    fill(tmp_path, [f'imgs/{n}.jpg' for n in range(4)], masks)
    assert 'anno/*.png: there is no such folder; type the folder alone, and image_pattern="{stem}.png" or ' \
        in (error := str(ask(tmp_path, images='imgs', masks='anno/*.png')))
    assert 'others are tried with images=none masks=none' in error and 'were found that' not in error


def test_a_pattern_of_the_run_is_named_where_other_data_have_none(tmp_path):
    """evaluate RUN data=OTHER said that nothing was found, without the setting that nobody had typed."""
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    error = str(ask(tmp_path, mask_pattern='{stem}_label.png'))
    assert 'others are tried with mask_pattern=none' in error and 'were found that' not in error
    assert 'the other half lies beside it' in str(ask(tmp_path / 'images', mask_pattern='{stem}_label.png'))


def test_folders_given_by_their_whole_path_are_those_inside(tmp_path):
    """Their files were listed as ignored, and a * in them meant itself."""
    fill(tmp_path, [f'a/p{n}/{n}.jpg' for n in range(4)], [f'b/{n}.png' for n in range(4)])
    for images in (f'{tmp_path}/a', f'{tmp_path}/a/*'):
        data = inspect(tmp_path, images=images, masks=f'{tmp_path}/b')[1]
        assert len(data.pairs.images) == 4 and not data.notes
    for name in ('config.py', 'log.txt', 'predictions/.hidden'):       # named, a run's and hidden ones are meant
        (tmp_path / 'run' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'run' / name).write_text('')
    (tmp_path / 'b').rename(tmp_path / 'run/predictions/b')
    for folder in ('run/predictions/b', f'{tmp_path}/run/predictions/b'):
        assert len(inspect(tmp_path, images='a', masks=folder)[1].pairs.images) == 4


def test_data_with_names_of_a_run_is_data(tmp_path):
    """config.py and log.txt in the top folder."""
    fill(tmp_path, [f'images/{n}.jpg' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    for name in ('config.py', 'log.txt', 'images/config.py'):
        (tmp_path / name).write_text('')
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_test_images_that_have_masks_are_kept(tmp_path):
    """The masks of all splits lie together: a test image without one is named, not left out."""
    fill(tmp_path, [f'images/{split}/{split}{n}.png' for split in ('train', 'test') for n in range(4)],
         [f'masks/{split}{n}.png' for split in ('train', 'test') for n in range(4)])
    assert [*np.bincount(inspect(tmp_path)[1].pairs.splits)] == [3, 1, 4]
    (tmp_path / 'masks/test2.png').unlink()
    assert f'image without a mask: {tmp_path}/images/test/test2.png' in str(ask(tmp_path))


def test_a_folder_named_after_masks_may_hold_the_images_too(tmp_path):
    """annotations/a.tif and a_mask.tif, and nothing else."""
    fill(tmp_path, [f'annotations/cell{n}.png' for n in range(4)], [f'annotations/cell{n}_mask.png' for n in range(4)])
    data = inspect(tmp_path)[1]
    assert all(os.fsdecode(mask) == os.fsdecode(image).replace('.png', '_mask.png')
               for image, mask in zip(data.pairs.images, data.pairs.masks)) and len(data.pairs.images) == 4


def test_masks_as_jpeg_beside_others_of_the_same_names_are_ignored(tmp_path):
    """mask/ holds 1.png and 1.jpg, a picture of the result."""
    fill(tmp_path, [*(f'images/{n}.png' for n in range(4)), *(f'masks/{n}.jpg' for n in range(4))],
         [f'masks/{n}.png' for n in range(4)])
    data = inspect(tmp_path)[1]
    assert all(mask.endswith(b'.png') for mask in data.pairs.masks)
    assert 'ignored 4 files, beside another of the same name: 0.jpg, ...' in data.notes
    for n in range(3):
        (tmp_path / f'masks/{n}.jpg').unlink()
    assert 'several files share one stem' in str(ask(tmp_path))


def test_check_names_every_file_that_has_no_partner(tmp_path, capsys):
    """Training names ten and counts the others."""
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(30)], [f'masks/{n}.png' for n in range(5)])
    assert train_unet.main(['check', f'data={tmp_path}/set', *WORDS]) == 2
    assert capsys.readouterr().err.count('image without a mask') == 25
    assert train_unet.main([f'data={tmp_path}/set', *WORDS]) == 2
    told = capsys.readouterr().err
    assert told.count('image without a mask') == 10 and '... and 15 more' in told


def test_of_many_files_without_a_partner_check_names_ten_and_a_file_the_others(tmp_path, capsys):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(60)], [f'masks/{n}.png' for n in range(5)])
    assert train_unet.main(['check', f'data={tmp_path}/set', *WORDS]) == 2
    told, path = capsys.readouterr().err, Path('runs/check/problems.txt')
    assert told.count('image without a mask') == 10 and f'... and 45 more, which {path} names' in told
    assert {*range(5, 60)} == {int(Path(line).stem) for line in told.splitlines() + path.read_text().splitlines()
                               if 'image without a mask' in line}


@pytest.mark.parametrize('suffix', ['jxl', 'npz', 'parquet', 'exr'])
def test_files_that_no_reader_knows_are_named_beside_those_without_a_partner(tmp_path, suffix):
    fill(tmp_path / 'set', [f'images/{n}.png' for n in range(3)], [f'masks/{n}.png' for n in range(4)])
    (tmp_path / f'set/images/3.{suffix}').write_bytes(b'')
    assert f'ignored 3.{suffix}, to be saved as PNG or TIFF first if meant' in ask(tmp_path / 'set').problems


def test_photographs_that_no_reader_knows_are_told_to_be_saved_otherwise(tmp_path):
    """Those of a phone were listed as ignored, like any XML."""
    fill(tmp_path, [], [f'masks/{n}.png' for n in range(3)])
    for n in range(3):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)))
        (tmp_path / f'images/{n}.png').rename(tmp_path / f'images/{n}.HEIC')
    told = 'ignored 3 files, *.heic, to be saved as PNG or TIFF first if meant: 0.HEIC, ...'
    assert told in ask(tmp_path).problems


# --- other files and folders ----------------------------------------------------------


def test_other_files_are_ignored_and_told(tmp_path):
    """Boxes, thumbnails and hidden files beside the masks."""
    folder = tmp_path / 'set'
    fill(folder, ['images/1.png', 'images/2.png'], ['masks/1.png', 'masks/2.png'])
    for name in ('masks/1.xml', 'masks/2.xml', 'images/Thumbs.db', 'masks/._1.png'):
        (folder / name).write_text('x')
    _, data = inspect(folder)
    assert len(data.pairs.images) == 2
    assert data.notes == ['ignored Thumbs.db', 'ignored ._1.png', 'ignored 2 files, *.xml: 1.xml, ...']


def test_files_of_the_desktop_are_named_in_the_notes(small_set):
    """In the top folder or beside the images."""
    (small_set / '.DS_Store').write_bytes(b'\0\0\0\1Bud1')
    _, data = inspect(small_set)
    assert data.notes == ['ignored .DS_Store']


def test_matrix_beside_its_photograph_is_no_image(tmp_path):
    """Oxford pets has images/Abyssinian_100.mat beside images/Abyssinian_100.jpg."""
    fill(tmp_path / 'set', [f'images/{n}.jpg' for n in range(3)], [f'masks/{n}.png' for n in range(3)])
    (tmp_path / 'set/images/2.mat').write_bytes(b'MATLAB 5.0')
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.images) == 3 and 'ignored 2.mat, beside another of the same name' in data.notes


def test_runs_below_the_data_are_no_data(tmp_path):
    """cd into the data, check, train: the pictures that check wrote are not images of the set."""
    fill(tmp_path, [f'{n}.jpg' for n in range(6)], [f'{n}_mask.png' for n in range(6)])
    for _ in range(2):
        assert train_unet.main(['check', 'data=.', *WORDS]) == 0
    assert (tmp_path / 'runs/check/samples.png').exists()


def test_a_run_inside_the_data_is_no_data(tmp_path):
    fill(tmp_path / 'set', [f'x{n}.png' for n in range(4)], [f'x{n}_mask.png' for n in range(4)])
    for name in ('curves.png', 'samples.png', 'config.py', 'log.txt'):
        save(tmp_path / f'set/out/{name}.png', np.zeros((8, 8)))
        (tmp_path / f'set/out/{name}.png').rename(tmp_path / f'set/out/{name}')
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.images) == 4 and not data.pairs.notes


def test_a_link_to_a_folder_of_the_set_is_named(tmp_path, caplog):
    fill(tmp_path, *([f'{kind}/{split}/{n}.png' for split in ('train', 'test') for n in range(4)]
                     for kind in ('images', 'masks')))
    (tmp_path / 'images' / 'val').symlink_to('test')
    (tmp_path / 'masks' / 'val').symlink_to('test')
    assert split_sizes(inspect(tmp_path)[1]) == [3, 1, 4]
    assert f'ignored {tmp_path}/images/val: it is the same folder as {tmp_path}/images/test' in caplog.text


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


def test_name_that_no_folder_can_have_is_told():
    """The system refuses 300 letters before it looks."""
    assert 'n' * 300 in str(ask('n' * 300))


def test_a_home_that_is_not_there_is_no_such_folder():
    config, _, _ = resolve_config(None, {'data': '~nobody_here/set'})
    with pytest.raises(train_unet.DataError, match='there is no such folder'):
        train_unet.find_pairs(config)


# --- lists of images and masks --------------------------------------------------------


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


@pytest.mark.parametrize('others, sizes', [(['test', 'val'], [4, 1, 1]), ([], [4, 1, 0])])
def test_a_list_without_a_split_is_split_by_the_folders_in_it(tmp_path, others, sizes):
    """Images of test/ were trained on."""
    rows = [(f'train/images/{n}.png', f'train/masks/{n}.png') for n in range(5 - (len(others) > 0))]
    rows += [(f'{split}/images/9.png', f'{split}/masks/9.png') for split in others]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, list=rows)
    _, data = inspect(tmp_path / 'list.csv')
    assert split_sizes(data) == sizes
    assert data.pairs.rule == 'the list list.csv' + ', its folders the split' * bool(others)


def test_a_split_in_a_list_counts_not_the_folders_in_it(tmp_path):
    rows = [(f'{folder}/images/{n}.png', f'{folder}/masks/{n}.png', split)
            for n, (folder, split) in enumerate([('train', 'val'), ('test', 'train'), ('train', 'train')])]
    fill(tmp_path, *[*zip(*rows)][:2])
    (tmp_path / 'list.csv').write_text('\n'.join(['image,mask,split', *map(','.join, rows)]))
    assert split_sizes(inspect(tmp_path / 'list.csv')[1]) == [2, 1, 0]


def test_a_list_may_have_paths_from_above_its_folder(tmp_path):
    """As a script wrote them that was started there."""
    folder = tmp_path / 'a' / 'set'
    rows = [(f'a/set/{n}.jpg', f'a/set/other{n}.png') for n in range(4)]
    fill(tmp_path, *zip(*rows))
    write_lists(folder, list=rows)
    assert partners(inspect(folder / 'list.csv')[1], tmp_path) == dict(rows)
    write_lists(folder, list=[('', ''), *rows])                        # Excel leaves such lines
    assert partners(inspect(folder / 'list.csv')[1], tmp_path) == dict(rows)
    write_lists(folder, list=[('b/9.jpg', 'b/9.png'), *rows])
    assert f'there is no {folder}/b/9.jpg' in str(ask(folder / 'list.csv'))


def test_a_list_may_have_semicolons(small_set):
    """As Excel writes them where the comma is for decimals."""
    rows = [f'images/{n:03d}.png;masks/{n:03d}.png' for n in range(12)]
    (small_set / 'list.csv').write_text('\n'.join(['image;mask', *rows]))
    assert len(inspect(small_set / 'list.csv')[1].pairs.images) == 12


@pytest.mark.parametrize('folder', ['', 'lists/of/today'])
def test_a_list_made_on_windows_may_have_backslashes(small_set, folder):
    (small_set / folder).mkdir(parents=True, exist_ok=True)
    rows = [rf'images\{n:03d}.png,masks\{n:03d}.png' for n in range(12)]
    (small_set / folder / 'list.csv').write_text('\n'.join(['image,mask', *rows]))
    assert len(inspect(small_set / folder / 'list.csv')[1].pairs.images) == 12


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


@pytest.mark.parametrize('head, words, is_split', [
    ('image,mask,subset', ('Training', 'validation'), True), ('fold;image;mask', ('train', 'val'), True),
    ('image,mask,site', ('north', 'val'), False), ('image,mask,site', ('', 'val'), False)])
def test_a_column_that_holds_nothing_but_splits_is_the_split_whatever_its_name(small_set, head, words, is_split):
    between, names = ';' if ';' in head else ',', sorted(path.name for path in (small_set / 'images').iterdir())
    lines = [head]
    for number, name in enumerate(names):
        row = {'image': f'images/{name}', 'mask': f'masks/{name}'}
        lines.append(between.join(row.get(word) or words[number < 5] for word in head.split(between)))
    (small_set / 'list.csv').write_text('\n'.join(lines))
    _, data = inspect(small_set / 'list.csv')
    assert (names_of(data, 'val') == {Path(name).stem for name in names[:5]}) == is_split


def test_a_column_that_holds_splits_does_not_undo_train_csv_and_val_csv(small_set):
    """Folds drawn from what others call their training set, with their column still there."""
    names = sorted(path.name for path in (small_set / 'images').iterdir())
    for file, held in (('train.csv', names[3:]), ('val.csv', names[:3])):
        lines = [f'images/{name},masks/{name},train' for name in held]
        (small_set / file).write_text('\n'.join(['image,mask,subset', *lines]))
    assert names_of(inspect(small_set / 'train.csv')[1], 'val') == {Path(name).stem for name in names[:3]}


def test_a_folder_that_is_a_link_to_a_drive_that_is_away_is_told_as_such(tmp_path):
    (tmp_path / 'net').symlink_to(tmp_path / 'drive')
    assert ask(tmp_path / 'net').problems == [f'{tmp_path}/net: is a link to {tmp_path}/drive, which is not there']


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


def test_columns_of_a_list_that_are_not_read_are_named(tmp_path):
    """Of fastai's is_valid, of folds and of patients nothing was said: they parted nothing."""
    fill(tmp_path, *[[f'{side}/{n}.png' for n in range(6)] for side in ('images', 'masks')])
    rows = [f'images/{n}.png,masks/{n}.png,{n > 3},p{n // 2}' for n in range(6)]
    (tmp_path / 'list.csv').write_text('\n'.join(['image,mask,is_valid,patient', *rows]))
    assert inspect(tmp_path / 'list.csv')[1].pairs.rule == 'the list list.csv, without its columns is_valid, patient'
    (tmp_path / 'list.csv').write_text('\n'.join(['image,mask,,patient', *[row.replace('True', '') for row in rows]]))
    assert inspect(tmp_path / 'list.csv')[1].pairs.rule == 'the list list.csv, without its column patient'


def test_the_first_line_of_a_list_without_a_header_is_shown_as_it_is(tmp_path):
    fill(tmp_path, ['images/0.png'], ['masks/0.png'])
    (tmp_path / 'list.csv').write_text('Images/0.PNG,Masks/0.PNG\n')
    assert str(ask(tmp_path / 'list.csv')).endswith('; its first line is Images/0.PNG,Masks/0.PNG')


def test_image_that_is_listed_twice_is_refused(small_set):
    """Even under another spelling: it could be learned from and validated on."""
    names = [f'{n:03d}.png' for n in range(12)]
    rows = [(f'images/{name}', f'masks/{name}') for name in names]
    with open(small_set / 'list.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('image', 'mask'), *rows, ('images/../images/003.png', 'masks/003.png')])
    error = ask(small_set / 'list.csv')
    assert error.problems == [f'{small_set}/list.csv: {small_set}/images/003.png is listed 2 times']


def test_a_list_of_classes_named_as_the_folders_of_their_images_is_not_offered(tmp_path):
    """BUSI's all_captions.csv: image_path,text_caption,label. The photographs of a folder would be united as a mask."""
    names = ['benign/1.png', 'benign/2.png', 'malignant/3.png']
    fill(tmp_path, names, [])
    rows = [f'{name},{name.split("/")[0]}' for name in names]
    (tmp_path / 'all.csv').write_text('\n'.join(['image_path,label', *rows]))
    assert 'all.csv   (' not in str(ask(tmp_path))
    with pytest.raises(DataError, match='line 2: benign/1.png would be an image and its mask at once'):
        train_unet.find_pairs({**train_unet.CONFIG, 'data': str(tmp_path / 'all.csv')})


def test_a_list_that_names_a_file_as_its_own_mask_is_refused(small_set):
    (small_set / 'list.csv').write_text('image,mask\nimages/000.png,images/000.png\nimages/001.png,masks/001.png\n')
    with pytest.raises(DataError, match='an image and its mask at once'):
        train_unet.find_pairs({**train_unet.CONFIG, 'data': str(small_set / 'list.csv')})


def test_a_list_that_names_images_as_their_own_masks_is_not_offered(tmp_path):
    """A list that gives images nobody has labelled yet themselves as masks."""
    images = [f'{kind}/{n}.png' for kind in ('raw', 'image') for n in range(9)]
    fill(tmp_path, images, [f'mask/{n}.png' for n in range(4)])
    rows = [f'{"mask" if n < 4 else "image"}/{n}.png,image/{n}.png' for n in range(9)]
    (tmp_path / 'df.csv').write_text('\n'.join(['masks,images', *rows]))
    assert 'images="image" masks="mask"' in str(ask(tmp_path)) and 'df.csv' not in str(ask(tmp_path))


def test_a_blank_mask_in_a_list_is_no_mask(tmp_path):
    save(tmp_path / 'a.png', np.zeros((8, 8, 3)))
    (tmp_path / 'list.csv').write_text('image,mask\na.png, \n')
    with pytest.raises(DataError, match='line 2: image and mask must both be given'):
        inspect(tmp_path / 'list.csv')


def write_lists(folder, **rows):
    """name.csv for each name, of rows (image, mask)."""
    for name, pairs in rows.items():
        (folder / f'{name}.csv').write_text('image,mask\n' + ''.join(f'{image},{mask}\n' for image, mask in pairs))


def test_lists_of_several_splits_are_one_set(tmp_path):
    """With train.csv come val.csv and test.csv, but for one without masks, or of another set; alone each is its own."""
    rows = [(f'{n}.jpg', f'other {9 - n}.png') for n in range(6)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, My_Train=rows[:4], My_Val=rows[4:], Their_Val=rows[:1])
    (tmp_path / 'My_Test.csv').write_text('image\n0.jpg\n')
    _, data = inspect(tmp_path / 'My_Train.csv')
    assert data.pairs.rule == \
        'the lists My_Train.csv and My_Val.csv, without My_Test.csv, in which no masks are named'
    assert [names_of(data, split) for split in ('train', 'val', 'test')] == [set('0123'), set('45'), set()]
    _, data = inspect(tmp_path / 'My_Val.csv', val_fraction=0)
    assert data.pairs.rule == 'the list My_Val.csv' and names_of(data, 'train') == set('45')
    write_lists(tmp_path, My_Val=rows[3:])
    assert f'My_Train.csv and {tmp_path}/My_Val.csv: {tmp_path}/3.jpg is listed 2 times' in str(
        ask(tmp_path / 'My_Train.csv'))


def test_a_list_without_masks_beside_one_with_masks(tmp_path):
    """An IndexError, once the lists beside it were told."""
    rows = [(f'{n}.jpg', f'other {9 - n}.png') for n in range(6)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, train=[(image, '') for image, _ in rows[:4]], val=rows[4:])
    assert f'{tmp_path}/train.csv, line 2: image and mask must both be given' in str(ask(tmp_path / 'train.csv'))


def test_a_list_that_pairs_otherwise_than_the_names_is_not_overruled(tmp_path):
    """Equal names by chance, as where both folders are numbered on their own."""
    rows = [(f'images/{n}.jpg', f'masks/{n * 7 % 10}.png') for n in range(10)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, known=[(image, f'masks/{n}.png') for n, (image, _) in enumerate(rows)])
    assert len(partners(inspect(tmp_path)[1], tmp_path)) == 10

    write_lists(tmp_path, pairs=rows)
    error = ask(tmp_path)
    assert f'list pairs.csv gives {tmp_path}/images/1.jpg the mask {tmp_path}/masks/7.png, its name ' \
        f'{tmp_path}/masks/1.png (8 such images)' in str(error)
    assert 'gives' in str(ask(tmp_path, images='images', masks='masks'))
    assert offered(error, 'data') == f'data={tmp_path}/pairs.csv'
    assert partners(inspect(tmp_path / 'pairs.csv')[1], tmp_path) == dict(rows)
    named = partners(inspect(tmp_path, mask_pattern='{stem}.png')[1], tmp_path)        # typed, so it is meant
    assert named == {f'images/{n}.jpg': f'masks/{n}.png' for n in range(10)}


def test_lines_whose_files_are_gone_may_be_left_out(tmp_path):
    rows = [(f'images/{n}.jpg', f'masks/{n}.png') for n in range(10)]
    fill(tmp_path, *zip(*rows[:8]))
    write_lists(tmp_path, pairs=rows)
    error = ask(tmp_path / 'pairs.csv')
    assert f'pairs.csv, line 10: there is no {tmp_path}/images/8.jpg' in str(error)
    assert 'to leave out 2 lines without a mask, or whose files are not there, type skip_unpaired=True' in str(error)
    _, data = inspect(tmp_path / 'pairs.csv', skip_unpaired=True)
    assert partners(data, tmp_path) == dict(rows[:8]) and 'without 2 lines for want of a file' in data.pairs.rule
    write_lists(tmp_path, pairs=rows[8:])
    assert 'skip_unpaired' not in str(ask(tmp_path / 'pairs.csv'))     # nothing would be left


def test_a_list_may_name_files_in_folders_below_by_their_names_alone(tmp_path):
    rows = [(f'images/{"ab"[n % 2]}/{n}.png', f'masks/{n * 7 % 10}.png') for n in range(10)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, pairs=[[os.path.basename(name) for name in row] for row in rows])
    assert partners(inspect(tmp_path / 'pairs.csv')[1], tmp_path) == dict(rows)
    assert offered(ask(tmp_path), 'data') == f'data={tmp_path}/pairs.csv'              # their stems pair otherwise
    os.remove(tmp_path / 'images/a/0.png')                             # masks/0.png is not meant
    assert f'pairs.csv, line 2: there is no {tmp_path}/0.png' in str(ask(tmp_path / 'pairs.csv'))
    for n in range(10):                                                # which masks? no image is one
        fill(tmp_path, [], [f'masks/again/{n}.png'])
    assert f'pairs.csv, line 3: there is no {tmp_path}/7.png' in str(ask(tmp_path / 'pairs.csv'))
    fill(tmp_path, ['images/a/0.png', 'images/b/0.png'], [])           # which 0.png?
    assert f'pairs.csv, line 2: there is no {tmp_path}/0.png' in str(ask(tmp_path / 'pairs.csv'))


def test_lists_that_lie_beside_the_data_are_offered(tmp_path):
    """No name tells which picture is which mask; first where nothing pairs, then where only the split is theirs."""
    folder = tmp_path / 'my set'
    rows = [(f'scans/p{n}.jpg', f'drawn/q{n * 7 % 10}.png') for n in range(10)]
    fill(folder, *zip(*rows))
    write_lists(folder, test=rows[8:], train=rows[:8], gone=[('a.jpg', 'b.png')], deeper=[])
    error = ask(folder)
    assert offered(error, 'data') == f'data="{folder}/train.csv"' and f'{folder}/gone' not in str(error)
    assert str(error).count('10 pairs, by the lists train.csv and test.csv') == 1
    _, data = inspect(folder / 'train.csv')
    assert partners(data, folder) == dict(rows) and len(data.pairs.rows('test')) == 2

    write_lists(folder, train=rows[:8], val=rows[8:], test=[('a.jpg', '')])
    assert [line for line in typed_lines(ask(folder)) if '.csv' in line] == [f'data="{folder}/train.csv"']

    folder = tmp_path / 'other'
    rows = [(f'images/{n}.jpg', f'masks/{n}.png') for n in range(10)]
    fill(folder, *zip(*rows))
    write_lists(folder, all=rows)
    assert not [note for note in inspect(folder)[1].notes if 'all.csv is meant' in note]
    (folder / 'all.csv').write_text('image,mask,split\n' + ''.join(
        f'{image},{mask},{"val" if number > 7 else "train"}\n' for number, (image, mask) in enumerate(rows)))
    told = f'if the split of the list all.csv is meant type data={folder}/all.csv'
    assert told in inspect(folder)[1].notes


def test_lists_of_images_in_csv_files_tell_the_split(tmp_path):
    """Kaggle's: the first column names the images, the others something else; val.csv of another set tells nothing."""
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(10)] for kind in ('images', 'masks')))
    for split, numbers in (('train_set', range(7)), ('val_set', range(7, 10))):
        (tmp_path / f'{split}.csv').write_text('id,age\n' + ''.join(f'{n},"{n + 30}"\n' for n in numbers))
    _, data = inspect(tmp_path)
    assert names_of(data, 'val') == set('789') and 'split by the text files in the top folder' in data.notes[0]
    (tmp_path / 'val_set.csv').write_text('id\n7\n8\n')              # nine of ten
    _, data = inspect(tmp_path)
    assert names_of(data, 'val') == set('78') and 'the images are split by the text files in the top folder' in data.notes
    assert f'1 images, such as {tmp_path}/images/9.png, are in no split by name: they are trained on' in data.notes
    (tmp_path / 'val_set.csv').write_text('id\n6\n7\n8\n')           # one of them in both lists
    assert not [note for note in inspect(tmp_path)[1].notes if 'split by the text files' in note]
    (tmp_path / 'val_set.csv').write_text('id\n7\n')
    told = 'ignored 2 files, *.csv, which do not list nine in ten images once and so tell no split: train_set.csv, ...'
    assert told in inspect(tmp_path)[1].notes


def test_images_that_a_list_has_no_mask_for_may_be_left_out(tmp_path):
    """A list of images whose masks nobody has brings no test split; single ones want the word that is told."""
    rows = [(f'{n}.jpg', f'other {9 - n}.png') for n in range(6)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, train=[*rows[:4], ('9.jpg', '')], test=[('7.jpg', ''), ('8.jpg', ' ')])
    error = ask(tmp_path / 'train.csv')
    assert offered(error, 'skip') == 'skip_unpaired=True' and 'test.csv' not in str(error)
    _, data = inspect(tmp_path / 'train.csv', skip_unpaired=True)
    assert data.pairs.rule == \
        'the list train.csv, without test.csv, in which no masks are named and 1 line for want of a file'
    assert len(data.pairs.images) == 4
    assert 'no line names an image and its mask' in str(ask(tmp_path / 'test.csv', skip_unpaired=True))
    assert 'skip_unpaired' not in str(ask(tmp_path / 'test.csv'))


# --- splits that names tell -----------------------------------------------------------


@pytest.mark.parametrize('words', ['training Validation testing', 'entrenamiento validación prueba', '训练集 验证集 测试集',
                                   'treino validação teste', 'treino validac\u0327a\u0303o teste',
                                   'обучение валидация тест', 'train val hold-out'])
def test_words_of_splits(tmp_path, words):
    for split in words.split():
        fill(tmp_path / 'set', [f'images/{split}/{split}.jpg'], [f'masks/{split}/{split}.png'])
    _, data = inspect(tmp_path / 'set')
    assert [names_of(data, split) for split in train_unet.SPLITS] == [{word} for word in words.split()]


def test_names_of_splits_in_two_letters(tmp_path):
    """DIS5K: DIS-TR, DIS-VD and DIS-TE1; but TCGA_TS_1 is a patient."""
    for folder in ('DIS-TR', 'DIS-VD', 'DIS-TE1', 'DIS-TE2'):
        fill(tmp_path / 'set', [f'{folder}/im/{folder}{n}.jpg' for n in range(3)],
             [f'{folder}/gt/{folder}{n}.png' for n in range(3)])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [3, 3, 6]
    assert train_unet.read_place('TCGA_TS_1')[0] == ''


@pytest.mark.parametrize('train, val', [('traindata', 'valdata'), ('trainingset', 'validationset'),
                                        ('train', 'validset'), ('trainsplit', 'devsplit'), ('train', 'validate')])
def test_words_that_hold_a_split_and_more_tell_the_split(tmp_path, train, val):
    places = [f'{train}/{{}}/{n}.png' for n in range(8)] + [f'{val}/{{}}/{n}.png' for n in range(8, 12)]
    fill(tmp_path, *([place.format(kind) for place in places] for kind in ('images', 'masks')))
    assert split_sizes(inspect(tmp_path)[1]) == [8, 4, 0]


def test_splits_and_roles_written_as_one_word_are_told_apart(tmp_path):
    places = [f'training{{}}/{n}.png' for n in range(8)] + [f'validation{{}}/{n}.png' for n in range(8, 12)]
    fill(tmp_path, *([place.format(kind) for place in places] for kind in ('images', 'masks')))
    assert split_sizes(inspect(tmp_path)[1]) == [8, 4, 0]


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


def test_one_folder_of_masks_in_each_split_is_no_choice(tmp_path):
    """ISIC 2017: the folders of the test split alone are called v2."""
    for number, (split, version) in enumerate([('Training', ''), ('Validation', ''), ('Test', '_v2')]):
        stems = [f'ISIC_{number * 4 + n:07}' for n in range(4)]
        fill(tmp_path / 'set', [f'ISIC-2017_{split}{version}_Data/{stem}.jpg' for stem in stems],
             [f'ISIC-2017_{split}{version}_Part1_GroundTruth/{stem}_segmentation.png' for stem in stems])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [4, 4, 4]


def test_a_folder_for_each_image_may_tell_its_split(tmp_path):
    folders = [f'{"train" if n < 8 else "val"}_{n:03d}' for n in range(12)]
    fill(tmp_path, *([f'{folder}/{name}.png' for folder in folders] for name in ('image', 'mask')))
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [8, 4, 0]
    assert all(os.path.dirname(image) == os.path.dirname(mask) for image, mask in partners(data, tmp_path).items())


def test_the_first_word_of_all_names_is_their_split(tmp_path):
    stems = [f'{kind}_{n}' for kind in ('train', 'testA', 'testB') for n in range(5)]
    fill(tmp_path, [f'{stem}.bmp' for stem in stems], [f'{stem}_anno.bmp' for stem in stems])
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [4, 1, 10] and names_of(data, 'test') == set(stems[5:])
    assert 'the images are split by the first word of their names' in data.notes
    fill(tmp_path, ['other_1.bmp'], ['other_1_anno.bmp'])              # not all of them: then it is no split
    assert split_sizes(inspect(tmp_path)[1]) == [13, 3, 0]


def test_names_that_end_in_ts_name_no_split(tmp_path):
    """BraTS, KiTS and LiTS are sets; nnU-Net's imagesTs are for testing."""
    fill(tmp_path / 'set', *[[f'{s}/{kind}/{n}.png' for s in ('LiTS', 'CHAOS') for n in range(3)]
                             for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.rows('test')) == 0 and len(data.pairs.images) == 6
    assert train_unet.read_place('imagesTs')[:2] == ('test', 'image')
    assert train_unet.told_role('MatLab_Code') == '' and train_unet.told_role('colorLab') == 'mask'


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


def test_a_folder_that_names_two_splits_names_none(tmp_path):
    names = [f'{s}/{n}.png' for s in ('train', 'val') for n in range(3)]
    fill(tmp_path / 'set', [f'TrainVal_images/{name}' for name in names],
         [f'TrainVal_annotations/{name}' for name in names])
    _, data = inspect(tmp_path / 'set')
    assert len(data.pairs.rows('val')) == 3


@pytest.mark.parametrize('splits, told', [(('train', 'val', 'spare'), 'trained on'),
                                          (('train', 'extra'), 'by chance')])
def test_folders_that_name_no_split_beside_those_that_do_are_told(tmp_path, splits, told):
    fill(tmp_path / 'set', *[[f'{s}/{kind}/{s}{n}.png' for s in splits for n in range(3)]
                             for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    note, = data.notes
    assert f'3 images, such as {tmp_path}/set/{splits[-1]}/' in note and note.endswith(told)


def test_one_image_of_no_split_is_split_with_those_for_training(tmp_path):
    fill(tmp_path / 'set', [f'train/images/{n}.png' for n in range(9)] + ['images/9.png'],
         [f'train/masks/{n}.png' for n in range(9)] + ['masks/9.png'])
    assert split_sizes(inspect(tmp_path / 'set')[1]) == [8, 2, 0]


@pytest.mark.parametrize('split', ['val', 'test'])
def test_a_set_that_is_all_in_one_split_is_split_afresh(tmp_path, split):
    """RailSem19 has only rs19_val, MVTec's masks lie all in test/."""
    fill(tmp_path / 'set', *[[f'{kind}/{split}/{n}.png' for n in range(10)] for kind in ('images', 'masks')])
    _, data = inspect(tmp_path / 'set')
    assert [len(data.pairs.rows(name)) for name in train_unet.SPLITS] == [8, 2, 0]
    assert data.notes == ['no image is named for training: all of them were split afresh']
    _, data = inspect(tmp_path / 'set', val_fraction=0)                # as evaluate asks
    assert (data.pairs.splits == train_unet.SPLITS.index(split)).all() and 'afresh' not in str(data.notes)


# --- splits that text files tell ------------------------------------------------------


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
    assert [names_of(data, part) for part in train_unet.SPLITS] == [set(parts[part]) for part in train_unet.SPLITS]
    told = [note for note in data.notes if 'text files' in note or '.txt' in note]
    assert told == ['the images are split by the text files in ImageSets/Segmentation']
    (folder / 'val.txt').write_text('\n'.join(stems[5:9]))             # one of train too
    (other / 'val.txt').unlink()
    data = inspect(tmp_path)[1]
    assert split_sizes(data) == [10, 2, 0]
    told = 'ignored 5 files, *.txt, which do not list nine in ten images once and so tell no split: ImageSets/Main/train.txt,'
    told += ' ...'
    assert [note for note in data.notes if '.txt' in note] == [told]


@pytest.mark.parametrize('train, val', [('trainval', 'test'), ('trn', 'val'), ('train', 'eval'),
                                        ('eg1800_train', 'eg1800_test'), ('my_list_train', 'my_list_val')])
def test_text_files_of_other_names_are_its_split_too(tmp_path, train, val):
    """The Oxford pets come with trainval.txt and test.txt, Aeroscapes with trn.txt and val.txt."""
    stems = [f'pug_{n}' for n in range(12)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'annotations/trimaps/{stem}.png' for stem in stems])
    (tmp_path / f'annotations/{train}.txt').write_text('\n'.join(f'{stem} 1 1 1' for stem in stems[:8]))
    (tmp_path / f'annotations/{val}.txt').write_text('\n'.join(f'{stem} 1 1 1' for stem in stems[8:]))
    (tmp_path / 'annotations/list.txt').write_text('\n'.join(stems))
    data = inspect(tmp_path)[1]
    assert names_of(data, 'test' if 'test' in val else 'val') == set(stems[8:])
    assert split_sizes(data) == ([6, 2, 4] if 'test' in val else [8, 4, 0])


def test_trainaug_lists_all_training_images(tmp_path):
    """VOC for DeepLab: train.txt holds some of them, and its validation images were trained on."""
    stems = [f'2008_{n:06}' for n in range(12)]
    fill(tmp_path, [f'JPEGImages/{stem}.png' for stem in stems], [f'SegmentationClassAug/{stem}.png' for stem in stems])
    (tmp_path / 'ImageSets/Segmentation').mkdir(parents=True)
    for name, listed in {'train': stems[:4], 'val': stems[8:], 'trainval': stems[:4] + stems[8:], 'aug': stems[4:8],
                         'trainaug': stems[:8]}.items():
        (tmp_path / f'ImageSets/Segmentation/{name}.txt').write_text('\n'.join(listed))
    data = inspect(tmp_path)[1]
    assert names_of(data, 'val') == set(stems[8:]) and split_sizes(data) == [8, 4, 0]


@pytest.mark.parametrize('other, lines', [('requirements-dev.txt', ['pytest']), ('fold1_train.txt', ['pug_9'])])
@pytest.mark.parametrize('has_training', [True, False])
def test_text_files_named_after_a_split_count_before_those_with_a_word_before_it(tmp_path, other, lines, has_training):
    """Beside test.txt lie a repository's own files, folds and subsets: test images were trained on."""
    stems = [f'pug_{n}' for n in range(12)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'masks/{stem}.png' for stem in stems])
    for name, listed in {'train.txt': stems[:6] * has_training, 'val.txt': stems[6:8] * has_training,
                         'test.txt': stems[8:], other: lines}.items():
        if listed:
            (tmp_path / name).write_text('\n'.join(listed))
    assert names_of(inspect(tmp_path)[1], 'test') == set(stems[8:])


def test_a_text_file_for_validation_alone_leaves_the_others_for_training(tmp_path):
    """fastai's camvid comes with valid.txt, sets of scenes with test.txt alone."""
    stems = [f'Seq05VD_f{n:05}' for n in range(10)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'labels/{stem}_P.png' for stem in stems])
    (tmp_path / 'valid.txt').write_text('\n'.join(f'{stem}.png' for stem in stems[7:]))
    assert names_of(inspect(tmp_path)[1], 'val') == set(stems[7:])
    (tmp_path / 'valid.txt').rename(tmp_path / 'test.txt')
    data = inspect(tmp_path)[1]
    assert names_of(data, 'test') == set(stems[7:]) and split_sizes(data) == [6, 1, 3]


def test_a_name_that_begins_with_another_is_not_that_in_a_text_file(tmp_path):
    """'photo (1).jpg' told of photo.jpg too. Of two columns the first names the image."""
    stems = ['photo', *(f'photo ({n})' for n in range(1, 6))]
    fill(tmp_path / 'a', [f'images/{stem}.png' for stem in stems], [f'masks/{stem}.png' for stem in stems])
    (tmp_path / 'a/val.txt').write_text('photo (4).png\nphoto (5).png\n')
    assert names_of(inspect(tmp_path / 'a')[1], 'val') == {'photo (4)', 'photo (5)'}
    stems = ['0', '1', '2', '3', 'of 0', 'of 1']
    fill(tmp_path / 'b', [f'images/{stem}.png' for stem in stems], [f'masks/{stem}.png' for stem in stems])
    (tmp_path / 'b/val.txt').write_text('0.png of 0.png\n1.png of 1.png\n')
    assert names_of(inspect(tmp_path / 'b')[1], 'val') == {'0', '1'}


@pytest.mark.parametrize('names', [['2', '5'], ['S2_2', 'another']])
def test_a_text_file_for_validation_alone_that_names_strangers_is_no_split(tmp_path, names):
    """Two digits are not S2_1 without what the others share, nor is the list of another set that of this one."""
    fill(tmp_path, [f'images/S2_{n}.png' for n in range(1, 11)], [f'masks/S2_{n}.png' for n in range(1, 11)])
    (tmp_path / 'val.txt').write_text('\n'.join(names))
    data = inspect(tmp_path)[1]
    assert split_sizes(data)[:2] == [8, 2]
    assert 'ignored val.txt, which do not list nine in ten images once and so tell no split' in data.notes


@pytest.mark.parametrize('name', ['{}_img', 'S2_{}', 'S2_{}_img'])
def test_text_files_may_list_names_without_what_all_of_them_share(tmp_path, name):
    """As mmsegmentation's lists do, which leave the suffix out."""
    stems = [f'{n}' for n in range(12)]
    fill(tmp_path, [f'imgs/{name.format(stem)}.png' for stem in stems],
         [f'gts/{name.format(stem)}_gt.png' for stem in stems])
    for split, part in (('train', stems[:8]), ('val', stems[8:])):
        (tmp_path / f'{split}.txt').write_text('\n'.join(part))
    assert names_of(inspect(tmp_path)[1], 'val') == {name.format(stem) for stem in stems[8:]}


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


def test_a_text_file_that_cannot_be_read_does_not_leave_the_split_to_chance(tmp_path, monkeypatch):
    fill(tmp_path, [f'images/{n}.png' for n in range(8)], [f'masks/{n}.png' for n in range(8)])
    (tmp_path / 'train.txt').write_text('0\n1\n2\n3\n4\n')
    (tmp_path / 'val.txt').write_text('5\n6\n7\n')
    assert split_sizes(inspect(tmp_path)[1])[:2] == [5, 3]
    def refuse(path, *how):
        raise PermissionError(13, 'Permission denied', str(path))
    monkeypatch.setattr(Path, 'read_bytes', refuse)
    with pytest.raises(DataError, match='train.txt: cannot be read: Permission denied') as told:
        inspect(tmp_path)
    assert 'type one of these' not in str(told.value)                  # each would be refused for the same file


def test_text_files_beside_folders_that_tell_the_split_are_named(tmp_path):
    fill(tmp_path, [f'images/{split}/{n}.png' for split in ('train', 'val') for n in range(4)],
         [f'masks/{split}/{n}.png' for split in ('train', 'val') for n in range(4)])
    for name in ('train.txt', 'val.txt'):
        (tmp_path / name).write_text('0\n1\n2\n3\n')
    assert inspect(tmp_path)[1].notes == ['ignored 2 files, *.txt, as folders tell the split: train.txt, ...']


def test_images_in_no_split_are_told_to_be_trained_on_where_none_are_drawn(tmp_path):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(4)] + [f'test/{kind}/{n}.png' for n in range(4, 6)]
                     for kind in ('images', 'masks')))
    told = [note for note in inspect(tmp_path, val_fraction=0)[1].notes if 'in no split by name' in note]
    assert len(told) == 1 and told[0].endswith('they are trained on')


# --- splits by chance, and groups -----------------------------------------------------


def test_a_stack_of_pages_is_told_where_there_are_too_few_images_to_split(tmp_path):
    """Lucchi's mitochondria: training.tif and training_groundtruth.tif, with a page for each slice."""
    for name in ('images/a.tif', 'masks/a.tif'):
        (tmp_path / name).parent.mkdir()
        tifffile.imwrite(tmp_path / name, np.eye(16, dtype=np.uint8)[None].repeat(5, 0), photometric='minisblack')
    first, _, told, *_ = ask(tmp_path).problems
    assert first == '1 image in 1 group cannot be split into train and val' and 'of a stack of pages' in told


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


@pytest.mark.parametrize('share, is_told', [(0.5, True), (0.0, True), (0.2, False)])
def test_a_share_for_validation_beside_a_split_by_name_is_told_to_do_nothing(tmp_path, share, is_told):
    """Who typed 0 to train on all images did not."""
    names = [f'{split}/{{}}/{n}.png' for split in ('train', 'val') for n in range(3)]
    fill(tmp_path, *([name.format(kind) for name in names] for kind in ('images', 'masks')))
    _, data = inspect(tmp_path, val_fraction=share)
    assert split_sizes(data) == [3, 3, 0]
    assert (f'val_fraction={share:g}: no effect, the data have a split of their own' in data.notes) == is_told


def test_test_images_stay_out_of_training(tmp_path):
    """Where only val is missing it is drawn from train, never from test."""
    for split, count in (('train', 6), ('test', 3)):
        fill(tmp_path / 'set', [f'{split}/images/{split}{n}.png' for n in range(count)],
             [f'{split}/masks/{split}{n}.png' for n in range(count)])
    _, data = inspect(tmp_path / 'set', val_fraction=0.5)
    assert names_of(data, 'test') == {'test0', 'test1', 'test2'}
    assert len(names_of(data, 'val')) == 3


def test_groups_stay_on_one_side(tmp_path):
    names = [f'patient{p}_slice{n}' for p in range(5) for n in range(4)]
    fill(tmp_path / 'set', [f'images/{n}.png' for n in names], [f'masks/{n}.png' for n in names])
    for seed in range(5):
        _, data = inspect(tmp_path / 'set', group_pattern=r'^(patient\d+)_', seed=seed)
        sides = [{name.split('_')[0] for name in names_of(data, s)} for s in ('train', 'val')]
        assert not sides[0] & sides[1] and all(sides)


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


def test_all_groups_of_a_group_pattern_count(tmp_path):
    names = [f'patient{p}_{side}_{n}' for p in range(6) for side in ('left', 'right') for n in range(3)]
    for name in names:
        save(tmp_path / f'set/images/{name}.png', np.zeros((8, 8, 3)))
        save(tmp_path / f'set/masks/{name}.png', 255 * (np.mgrid[:8, :8][0] > 4))
    parted = set()
    for seed in range(3):
        _, data = inspect(tmp_path / 'set', group_pattern='^(patient.)_(left|right)', seed=seed)
        sides, patients = ([{name.rsplit('_', last)[0] for name in names_of(data, split)} for split in ('train', 'val')]
                           for last in (1, 2))
        assert len(data.pairs.rows('val')) in (6, 9) and not sides[0] & sides[1]       # whole sides, not half of all
        parted |= patients[0] & patients[1]
    assert parted                                                      # a patient's two sides are two groups


def test_a_large_group_is_not_drawn_whole_for_validation(tmp_path):
    """Two patients with 18 and 2 slices at a fifth: the small one is validated on, whatever the seed."""
    names = [f'a_{n}' for n in range(18)] + [f'b_{n}' for n in range(2)]
    fill(tmp_path / 'set', [f'images/{n}.png' for n in names], [f'masks/{n}.png' for n in names])
    for seed in range(5):
        assert names_of(inspect(tmp_path / 'set', group_pattern='^[ab]', seed=seed)[1], 'val') == {'b_0', 'b_1'}


def test_group_pattern_that_is_not_found_is_refused(small_set):
    """A name without a group would be a group of its own, and nobody would know."""
    (small_set / 'images/007.png').rename(small_set / 'images/p7.png')
    (small_set / 'masks/007.png').rename(small_set / 'masks/p7.png')
    error = ask(small_set, group_pattern=r'^(\d\d)')
    assert f"group_pattern='^(\\\\d\\\\d)' is not found in {small_set}/images/p7.png" in str(error)
    inspect(small_set, group_pattern=r'(\d)')


def test_group_pattern_may_hold_what_image_pattern_says_besides(tmp_path):
    """The patient stands before {stem}, in which alone it was looked for."""
    fill(tmp_path, [f'p{n % 3}_{n}_rgb.png' for n in range(9)], [f'{n}_gt.png' for n in range(9)])
    typed = {'image_pattern': '*_{stem}_rgb.png', 'mask_pattern': '{stem}_gt.png'}
    assert len({name[:2] for name in names_of(inspect(tmp_path, group_pattern='^p[0-9]', **typed)[1], 'val')}) == 1


def test_groups_that_folders_tear_apart_are_told(tmp_path):
    for split in ('train', 'val'):
        for name in ('video0_a', 'video1_a'):
            save(tmp_path / f'set/images/{split}/{name}{split}.png', np.zeros((8, 8, 3)))
            save(tmp_path / f'set/masks/{split}/{name}{split}.png', 255 * (np.mgrid[:8, :8][0] > 4))
    _, data = inspect(tmp_path / 'set', group_pattern=r'^video\d')
    assert any(note.startswith('2 of 2 groups of images') for note in data.notes)


# --- folds ----------------------------------------------------------------------------


@pytest.mark.parametrize('share, folds, count', [(0.2, 5, 23), (0.25, 4, 12), (0.3, 3, 20)])
def test_folds_hold_out_each_image_once(tmp_path, share, folds, count):
    fill(tmp_path, [f'images/{n}.png' for n in range(count)], [f'masks/{n}.png' for n in range(count)])
    held = []
    for fold in range(folds):
        _, data = inspect(tmp_path, val_fraction=share, fold=fold)
        held += data.pairs.images[data.pairs.rows('val')].tolist()
        if not fold:
            assert held == inspect(tmp_path, val_fraction=share)[1].pairs.images[data.pairs.rows('val')].tolist()
    assert len({*held}) == len(held) == round(share * folds * count)
    with pytest.raises(train_unet.ConfigError, match=f'makes those from 0 to {folds - 1}'):
        inspect(tmp_path, val_fraction=share, fold=folds)


def test_folds_keep_groups_together(tmp_path):
    names = [f'{film}_{n}.png' for film in 'abcdefghij' for n in range(3)]
    fill(tmp_path, [f'images/{name}' for name in names], [f'masks/{name}' for name in names])
    held = []
    for fold in range(5):
        _, data = inspect(tmp_path, fold=fold, group_pattern='^[a-z]')
        films = {os.path.basename(os.fsdecode(path))[0] for path in data.pairs.images[data.pairs.rows('val')]}
        assert len(films) == 2 and len(data.pairs.rows('val')) == 6
        held += films
    assert sorted(held) == [*'abcdefghij']


def test_a_fold_comes_near_to_its_share_and_leaves_some_for_training():
    held = lambda lengths, **how: [train_unet.hold_out([[n] * length for n, length in enumerate(lengths)], sum(lengths),
                                                       {**train_unet.CONFIG, 'fold': fold, **how}) for fold in range(3)]
    assert [len(rows) for rows in held([3] * 8)] == [6, 3, 6]          # of 4.8, 9.6 and 14.4
    assert sorted(sum(held([1] * 3), [])) == [0, 1, 2]
    assert len(held([1, 1], val_fraction=0.9)[0]) == 1


@pytest.mark.parametrize('lengths', [[10] * 7, [8] * 17, [1, 9, 2, 7, 7, 3, 12, 1, 1, 5, 20, 4]])
@pytest.mark.parametrize('seed', [0, 1])
def test_folds_leave_out_no_group_whatever_their_sizes(lengths, seed):
    """Each fold began at a share of the groups and took a share of the rows: of seven patients two never validated."""
    rows = iter(range(sum(lengths)))
    groups = [[next(rows) for _ in range(length)] for length in lengths]
    folds = [train_unet.hold_out(groups, sum(lengths), {**train_unet.CONFIG, 'seed': seed, 'fold': fold})
             for fold in range(5)]
    assert sorted(sum(folds, [])) == [*range(sum(lengths))]
    assert max(map(len, folds)) <= sum(lengths) / 5 + max(lengths)


def test_a_fold_where_names_tell_the_split_is_refused(tmp_path):
    fill(tmp_path, [f'images/{split}/{n}.png' for split in ('train', 'val') for n in range(4)],
         [f'masks/{split}/{n}.png' for split in ('train', 'val') for n in range(4)])
    with pytest.raises(train_unet.ConfigError, match='fold=1: there is no such fold: no split is drawn: type fold=0'):
        inspect(tmp_path, fold=1)


def test_no_seed_is_named_where_a_broken_file_had_a_part_in_the_draw(tmp_path):
    for n in range(60):
        save(tmp_path / f'images/{n}.png', np.zeros((8, 8, 3)) + n)
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(8, dtype=int) * (n in (3, 23)))
    (tmp_path / 'images/30.png').write_bytes(b'no picture')
    notes = [note for seed in range(12) for note in inspect(tmp_path, seed=seed, skip_broken=True)[1].notes
             if 'no validation mask' in note]
    assert notes and not any('try seed=' in note for note in notes)


def test_a_seed_that_draws_the_lacking_class_is_named(tmp_path):
    """Two of sixty parts have a defect, as in a factory."""
    for n in range(60):
        picture = np.zeros((8, 8, 3)) + n
        save(tmp_path / f'images/{n}.png', picture)
        save(tmp_path / f'masks/{n}.png', 255 * np.eye(8, dtype=int) * (n in (3, 23)))
    seeds = {seed: [note for note in inspect(tmp_path, seed=seed)[1].notes if 'no validation mask' in note]
             for seed in range(12)}
    lacking = [notes[0] for notes in seeds.values() if notes]
    assert lacking and len(lacking) < 12
    better = int(re.search(r'; try seed=(\d+)$', lacking[0])[1])
    assert not [note for note in inspect(tmp_path, seed=better)[1].notes if 'mask has class' in note]


@pytest.mark.parametrize('images, masks, line', [
    ('{split}/images/{n:03}.png', '{split}/masks/{n:03}.png', 'images="*/images" masks="*/masks" skip_unpaired=True'),
    ('images/{split}/{n:03}.png', 'masks/{split}/{n:03}.png', 'images="images" masks="masks" skip_unpaired=True')])
def test_a_gap_on_either_side_is_no_shift_of_all_numbers(tmp_path, images, masks, line):
    """No mask of 5 and no image of 103: a line for train/ alone was offered."""
    files = [(split, n) for split, start in (('train', 0), ('val', 100)) for n in range(start, start + 8)]
    fill(tmp_path, [images.format(split=split, n=n) for split, n in files if n != 103],
         [masks.format(split=split, n=n) for split, n in files if n != 5])
    assert typed_lines(ask(tmp_path)) == [line]


def test_masks_named_as_other_images_are_offered_for_those_alone(tmp_path):
    """brain_images/3.png with brain_masks/3.png, images/image_3.png with masks/image_3.png."""
    fill(tmp_path, [f'brain_images/{n}.png' for n in range(10)] + [f'images/image_{n}.png' for n in range(10)],
         [f'brain_masks/{n}.png' for n in range(10)] + [f'masks/image_{n}.png' for n in range(10)])
    lines = typed_lines(ask(tmp_path))
    assert {'images="brain_images" masks="brain_masks"', 'images="images" masks="masks"'} <= {*lines}
    for line in lines:
        pairs = partners(inspect(tmp_path, **typed(line))[1], tmp_path)
        assert all(os.path.basename(image) == os.path.basename(mask) for image, mask in pairs.items())


def test_a_folder_of_images_none_of_which_is_named_as_a_mask_is_left_out(tmp_path):
    """Pictures of the training beside the data."""
    images = [f'{split}images/{n}.png' for split in ('', 'val_') for n in range(6 if split else 10)]
    masks = [path.replace('images', 'annotation') for path in images]
    fill(tmp_path, images + [f'cropped_images/Epoch{n}.png' for n in range(5)], masks)
    _, data = inspect(tmp_path)
    assert partners(data, tmp_path) == dict(zip(images, masks)) and len(data.pairs.rows('val')) == 6
    assert 'ignored 5 files, in cropped_images, where no name is that of a mask: Epoch0.png, ...' in data.notes
    fill(tmp_path, [], [f'annotation/Epoch{n}.png' for n in range(4, 5)])      # which images are meant?
    assert 'several folders could hold the images: cropped_images, images' in str(ask(tmp_path))


def test_copies_that_are_numbered_but_for_the_first_are_groups(tmp_path):
    """Medetec's photographs, each turned and mirrored: x, x_1, x_2, x_3, and some x hold a number of their own."""
    stems = [*(f'ulcer-{n}' for n in range(9)), *(f'ulcer-3-{n}' for n in range(5))]
    names = [f'{stem}{copy}.png' for stem in stems for copy in ('', '_1', '_2', '_3')]
    fill(tmp_path, [f'images/{name}' for name in names], [f'masks/{name}' for name in names])
    note, = [note for note in inspect(tmp_path)[1].notes if 'begin in groups' in note]
    assert typed(note[note.index('group_pattern'):]) == {'group_pattern': '^[^_]*'}
    folder = tmp_path / 'alone'
    fill(folder, [f'images/{stem}.png' for stem in stems], [f'masks/{stem}.png' for stem in stems])
    assert 'begin in groups' not in str(inspect(folder)[1].notes)


def test_one_name_in_several_folders_tells_of_no_group(tmp_path):
    for folder in ('images', 'back/images', 'data/new/images'):
        fill(tmp_path, [f'{folder}/image_{n}.png' for n in range(8)],
             [f'{folder.replace("images", "masks")}/image_{n}.png' for n in range(8)])
    assert not [note for note in inspect(tmp_path)[1].notes if 'begin in groups' in note]


@pytest.mark.parametrize('layout', ['train_data/{split}/{role}/{n}.png', '{role}/training/{split}/{n}.png',
                                    'train{tail}/{split}/{n}.png'])
def test_a_folder_of_training_data_may_hold_one_that_validates(tmp_path, layout):
    """All of train_data/val/ was trained on."""
    files = [(split, n) for split, start in (('train', 0), ('val', 10)) for n in range(start, start + 5)]
    images, masks = ([layout.format(split=split, n=n, role=role, tail=tail) for split, n in files]
                     for role, tail in (('images', ''), ('masks', '_masks')))
    if 'role' in layout:                                               # or the name of the only folder is not looked at
        images, masks = images + ['test_data/images/20.png'], masks + ['test_data/masks/20.png']
    fill(tmp_path, images, masks)
    _, data = inspect(tmp_path)
    assert names_of(data, 'val') == {str(n) for n in range(10, 15)} and len(data.pairs.rows('train')) == 5


@pytest.mark.parametrize('line', ['images\\{stem}.png', '{stem}.png,{stem}_mask.png', 'masks/{stem}_mask.png',
                                  'images/{stem}.png\tmasks/{stem}_mask.png'])
def test_text_files_tell_the_split_as_other_programs_write_them(tmp_path, line):
    stems = [f'im{n}' for n in range(10)]
    fill(tmp_path, [f'images/{stem}.png' for stem in stems], [f'masks/{stem}_mask.png' for stem in stems])
    for name, some in (('train', stems[:6]), ('val', stems[6:8]), ('test', stems[8:])):
        (tmp_path / f'{name}.txt').write_text(''.join(line.format(stem=stem) + '\n' for stem in some))
    assert split_sizes(inspect(tmp_path)[1]) == [6, 2, 2]


def test_a_list_may_have_tabs(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    rows = ['image\tmask'] + [f'images/{n}.png\tmasks/{n}.png' for n in range(4)]
    (tmp_path / 'list.csv').write_text('\n'.join(rows))
    assert len(inspect(tmp_path / 'list.csv')[1].pairs.images) == 4


def test_a_list_with_spaces_before_quotes(tmp_path):
    fill(tmp_path, ['a, b/0.png', 'a, b/1.png'], ['c/0.png', 'c/1.png'])
    (tmp_path / 'list.csv').write_text('image, mask\n"a, b/0.png", "c/0.png"\n"a, b/1.png", "c/1.png"\n')
    assert len(inspect(tmp_path / 'list.csv')[1].pairs.images) == 2


def test_columns_that_the_first_line_does_not_name_are_refused(tmp_path):
    """A third column without a name, of splits perhaps, was dropped; empty ones are."""
    fill(tmp_path, ['0.png', '1.png'], ['m0.png', 'm1.png'])
    listed = tmp_path / 'list.csv'
    for end in ('val', ''):
        listed.write_text(f'image,mask\n0.png,m0.png,{end}\n1.png,m1.png,,\n,,\n')
        if end:
            assert f'{listed}, line 2: has more columns than the first line' in str(ask(listed))
    assert len(inspect(listed)[1].pairs.images) == 2
    listed.write_text('image,mask\n0.png,m0.png\n,m1.png\n')
    assert 'line 3: image and mask must both be given' in str(ask(listed))


def test_a_column_of_vehicles_tells_no_split(tmp_path):
    fill(tmp_path, [f'{n}.png' for n in range(4)], [f'm{n}.png' for n in range(4)])
    rows = [f'{n}.png,m{n}.png,{kind}\n' for n, kind in enumerate(['train', 'car', 'bus', 'train'])]
    (tmp_path / 'list.csv').write_text('image,mask,kind\n' + ''.join(rows))
    assert split_sizes(inspect(tmp_path / 'list.csv')[1])[:2] == [3, 1]


@pytest.mark.parametrize('last', ['', 'test_hard'])
def test_a_split_column_of_another_name_with_one_odd_word(tmp_path, last):
    """All of the column was ignored for it, and images for testing trained. A blank is of no split; words are asked."""
    splits = ['train', 'train', 'train', 'val', 'test', last]
    rows = [(f'{n}.png', f'm{n}.png', split) for n, split in enumerate(splits)]
    fill(tmp_path, *[*zip(*rows)][:2])
    (tmp_path / 'list.csv').write_text('image,mask,subset\n' + ''.join(','.join(row) + '\n' for row in rows))
    if last:
        assert "line 7: split='test_hard': choose from train, val, test" in str(ask(tmp_path / 'list.csv'))
    else:
        assert names_of(inspect(tmp_path / 'list.csv')[1], 'test') == {'4'}
    lines = (tmp_path / 'list.csv').read_text().splitlines()
    split = ['train'] * 5 + ['test']                                   # a column without odd words comes first
    (tmp_path / 'list.csv').write_text('\n'.join(map(','.join, zip(lines, ['part', *split]))))
    assert names_of(inspect(tmp_path / 'list.csv')[1], 'test') == {'5'}


def test_masks_named_as_results_are_left_out_where_others_are_not(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(6)],
         [f'masks/{n}.png' for n in range(6)] + [f'masks/{n}_predict.png' for n in (1, 2)])
    _, data = inspect(tmp_path)
    assert partners(data, tmp_path) == {f'images/{n}.png': f'masks/{n}.png' for n in range(6)}
    assert 'ignored 2 files, named as results: 1_predict.png, ...' in data.notes
    for n in range(6):
        os.remove(tmp_path / f'masks/{n}.png')
    fill(tmp_path, [], [f'masks/{n}_predict.png' for n in range(6)])   # nothing else is there
    assert len(inspect(tmp_path)[1].pairs.masks) == 6


def test_objects_in_numbers_of_their_own_are_one_class_also_beside_results(tmp_path):
    """As classes 1 and 2 they were read, file by file, where one folder held something else."""
    for name in 'abcd':
        fill(tmp_path, [f'{name}/images/{name}.png'], [])
        for number, other in ((1, 'one.png'), (2, 'two.png'), (1, 'one_pred.png')):
            save(tmp_path / name / 'masks' / other, np.eye(8, k=number, dtype=int) * number)
    assert inspect(tmp_path)[1].coding.words.startswith('0 is background, 1 foreground')


@pytest.mark.parametrize('others', [['one_pred.png'], ['one.jpg', 'two.jpg']])
def test_what_is_ignored_is_not_united(tmp_path, others):
    """The whole folder of an image's masks was read, with results and pictures of masks that were told as ignored."""
    for name in 'abcd':
        fill(tmp_path, [f'{name}/images/{name}.png'], [])
        objects(tmp_path / name / 'masks', ['one.png', 'two.png'])
        for other in others if name in 'bc' else ():
            save(tmp_path / name / 'masks' / other, np.full((8, 8), 255))
    config, data = inspect(tmp_path)
    assert [mask_of(data, config, name)[:, 0].tolist() for name in 'ab'] == [[1, 1, 0, 0, 0, 0, 0, 0]] * 2
    assert len(others) > 1 or any('named as results' in note for note in data.notes)


def test_folders_of_masks_are_not_offered_as_the_images_that_text_files_list(tmp_path):
    """The lists of several VOC trees, of which one name is in a folder for objects too."""
    for tree in 'ab':
        fill(tmp_path / tree, [f'JPEGImages/{n}.png' for n in range(6)],
             [f'Segmentation{kind}/{n}.png' for n in range(6) for kind in ('Class', 'Object')])
        for name, some in (('train', range(4)), ('val', range(4, 6))):
            path = tmp_path / tree / f'ImageSets/Segmentation/{name}.txt'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('\n'.join(map(str, some)))
    _, data = inspect(tmp_path, images='*/JPEGImages', masks='*/SegmentationClass')
    assert not [note for note in data.notes if 'SegmentationObject masks=' in note]


@pytest.mark.parametrize('images, masks, pairs', [
    ([n for n in range(60) if n != 9], [n for n in range(60) if n != 10], 58),
    ([n for n in range(40) if n != 39], [n for n in range(40) if n != 17], 38), ([0, 2, 3, 4], [0, 1, 3, 4], 3)])
def test_one_file_missing_on_each_side_is_no_shift(tmp_path, images, masks, pairs):
    """Neighbours, or the last one: as many files pair once all numbers are shifted."""
    fill(tmp_path, [f'images/frame_{n:03}.jpg' for n in images], [f'masks/frame_{n:03}.png' for n in masks])
    lines = typed_lines(ask(tmp_path))
    assert lines == ['images="images" masks="masks" skip_unpaired=True']
    assert len(inspect(tmp_path, **typed(lines[0]))[1].pairs.images) == pairs


@pytest.mark.parametrize('start', [0, 5])
def test_frames_counted_from_another_number_get_no_line(tmp_path, start):
    fill(tmp_path, [f'images/frame_{n}.jpg' for n in range(start + 1, start + 9)],
         [f'masks/frame_{n}.png' for n in range(start, start + 8)])
    assert typed_lines(ask(tmp_path)) == []


@pytest.mark.parametrize('image, mask, line', [
    ('s{}_c1.jpg', 's{}_c2.png', 'mask_pattern="{stem}2.png"'), ('{0}/{0}_T1.jpg', '{0}/{0}_T2.png', None)])
def test_masks_told_by_the_number_of_their_channel_get_a_line(tmp_path, image, mask, line):
    paths = [[side.format(n) for n in range(1, 6)] for side in (image, mask)]
    fill(tmp_path / 'set', *paths)
    first, *_ = typed_lines(ask(tmp_path / 'set'))
    assert line in (None, first)
    assert partners(inspect(tmp_path / 'set', **typed(first))[1], tmp_path / 'set') == dict(zip(*paths))


@pytest.mark.parametrize('image, mask, other, folder', [
    ('IMG_{}.jpg', 'IMG_{}_label.png', 'IMG_{}_label.jpg', 'images_vis'),
    ('slide-{}.jpg', 'slide{}.png', 'slide{}.jpg', 'result_images'),
    ('DSC00{}.jpg', '00{}_mask.png', '00{}_mask.jpg', 'images_small')])
def test_a_folder_of_pictures_named_after_the_masks_does_not_hide_the_images(tmp_path, image, mask, other, folder):
    images, masks, others = ([f'{place}/{name.format(n)}' for n in range(1, 5)]
                             for place, name in (('images', image), ('masks', mask), (folder, other)))
    fill(tmp_path / 'set', images + others[:2 if folder == 'images_small' else 4], masks)
    first, *_ = typed_lines(ask(tmp_path / 'set'))
    assert partners(inspect(tmp_path / 'set', **typed(first))[1], tmp_path / 'set') == dict(zip(images, masks))


def test_a_cup_within_its_disc_is_no_second_drawing(tmp_path):
    for n in range(5):
        fill(tmp_path / 'set', [f'e{n}/image.png'], [])
        for name, side in (('disc', 6), ('cup', 5)):
            save(tmp_path / f'set/e{n}/masks/{name}.png', np.pad(np.full((side, side), 255), (0, 8 - side)))
    note, = (note for note in inspect(tmp_path / 'set')[1].notes if 'united' in note)
    assert note.startswith('cup and disc are united: one class, unless you draw them into one mask')


def test_names_with_commas_in_a_text_file_tell_the_split(tmp_path):
    fill(tmp_path, [f'images/{n},5.jpg' for n in range(8)], [f'masks/{n},5.png' for n in range(8)])
    (tmp_path / 'val.txt').write_text('1,5\n4,5\n6,5\n7,5\n')
    assert names_of(inspect(tmp_path)[1], 'val') == {'1,5', '4,5', '6,5', '7,5'}


def test_a_kind_within_a_split_is_no_split_of_its_own(tmp_path):
    files = [f'train/{{role}}/{folder}/{folder}{n}.png' for folder in ('test tube', 'beaker') for n in range(5)]
    fill(tmp_path, *([file.format(role=role) for file in [*files, 'test/{role}/beaker/9.png']]
                     for role in ('images', 'masks')))
    assert split_sizes(inspect(tmp_path)[1])[2] == 1


def test_a_folder_whose_masks_are_named_otherwise_is_not_left_out(tmp_path):
    """Equal names in one folder, b0 and m0 in the other."""
    fill(tmp_path, [f'site1_images/a{n}.png' for n in range(6)] + [f'site2_images/b{n}.png' for n in range(6)],
         [f'site1_masks/a{n}.png' for n in range(6)] + [f'site2_masks/m{n}.png' for n in range(6)])
    assert len(inspect(tmp_path)[1].pairs.images) == 12


@pytest.mark.parametrize('names', [[f'case{n}{"_pred" * (n > 6)}' for n in range(1, 9)],
                                   [f'case{n}{"_output" if n % 2 else "_mask"}' for n in range(1, 9)]])
def test_masks_drawn_with_the_help_of_a_program_are_masks(tmp_path, names):
    """No other lies beside them."""
    fill(tmp_path, [f'images/case{n}.jpg' for n in range(1, 9)], [f'masks/{name}.png' for name in names])
    _, data = inspect(tmp_path)
    assert partners(data, tmp_path) == {f'images/case{n}.jpg': f'masks/{name}.png' for n, name in enumerate(names, 1)}


@pytest.mark.parametrize('folder', ['original_images', 'images_raw', 'rgb_images'])
def test_a_folder_of_as_many_images_as_there_are_masks_is_not_left_out_unasked(tmp_path, folder):
    names = [(f'{folder}/DSC{n:03}.jpg', f'masks/{n:03}_mask.png', f'preview_images/{n:03}_mask.jpg') for n in range(8)]
    images, masks, others = zip(*names)
    fill(tmp_path, [*images, *others], masks)
    assert f'could hold the images: {", ".join(sorted((folder, "preview_images")))}' in str(ask(tmp_path))


def test_a_small_folder_whose_masks_are_named_otherwise_is_not_left_out_either(tmp_path):
    """Four images of a second site, whose masks are m0 to m3."""
    fill(tmp_path, [f'site1_images/a{n}.png' for n in range(20)] + [f'site2_images/b{n}.png' for n in range(4)],
         [f'site1_masks/a{n}.png' for n in range(20)] + [f'site2_masks/m{n}.png' for n in range(4)])
    found = partners(inspect(tmp_path)[1], tmp_path)
    assert len(found) == 24 and found['site2_images/b3.png'] == 'site2_masks/m3.png'


@pytest.mark.parametrize('image, settings', [('photo.png', {'mask_pattern': 'mask_{stem}.png'}), ('images/p.png', {})])
def test_a_list_may_name_the_folder_that_an_image_lies_in(tmp_path, image, settings):
    fill(tmp_path, [f'{n}/{image}' for n in range(6)], [f'{n}/mask_{k}.png' for n in range(6) for k in range(2)])
    (tmp_path / 'all.csv').write_text('image,mask\n' + ''.join(f'{n}/{image},{n}\n' for n in range(6)))
    config = {**train_unet.CONFIG, 'data': str(tmp_path / 'all.csv'), **settings}
    assert len(train_unet.find_pairs(config).images) == 6


@pytest.mark.parametrize('name', ['train_log.csv', 'test_results.txt'])
def test_a_log_named_after_a_split_is_no_list_of_it(tmp_path, name):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    (tmp_path / 'val.txt').write_text('5\n6\n7\n')
    (tmp_path / name).write_text('epoch,loss\n1,0.5\n')
    assert names_of(inspect(tmp_path)[1], 'val') == set('567')


def test_blank_lines_in_two_lists_are_no_name(tmp_path):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    (tmp_path / 'val.txt').write_text('5\n6\n\n')
    (tmp_path / 'test.txt').write_text('7\n\n')
    assert split_sizes(inspect(tmp_path)[1]) == [5, 2, 1]


@pytest.mark.parametrize('name', ['train', 'trainval'])
def test_trainval_csv_repeats_train_csv_and_val_csv(tmp_path, name):
    rows = [(f'{n}.jpg', f'other {n}.png') for n in range(6)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, train=rows[:3], val=rows[3:4], trainval=rows[:4], test=rows[4:])
    assert split_sizes(inspect(tmp_path / f'{name}.csv')[1]) == [3, 1, 2]


def test_a_list_beside_it_that_cannot_be_read_is_named(tmp_path):
    names = ['a', 'b', 'c', 'größe']
    fill(tmp_path, [f'{name}.jpg' for name in names], [f'{name}_m.png' for name in names])
    write_lists(tmp_path, train=[(f'{name}.jpg', f'{name}_m.png') for name in names[:3]])
    (tmp_path / 'val.csv').write_bytes('image,mask\ngröße.jpg,größe_m.png\n'.encode('cp1252'))
    assert f'{tmp_path}/val.csv: cannot be read as csv' in str(ask(tmp_path / 'train.csv'))


def test_lists_of_several_splits_may_be_named_in_capitals(tmp_path):
    rows = [(f'{n}.jpg', f'other {n}.png') for n in range(6)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, TRAIN=rows[:4], VAL=rows[4:])
    for name in ('TRAIN', 'VAL'):
        (tmp_path / f'{name}.csv').rename(tmp_path / f'{name}.CSV')
    assert split_sizes(inspect(tmp_path / 'TRAIN.CSV')[1]) == [4, 2, 0]


def test_folders_sound_alike_on_windows(monkeypatch):
    """The backslash that was left over counted as a folder more."""
    wanted = train_unet.likelihood('/set/rgb/0.png', '/set/drawn/0.png', 0.5, 1)
    with monkeypatch.context() as patch:
        patch.setattr(train_unet, 'Path', PureWindowsPath)
        patch.setattr(os, 'path', ntpath)
        found = train_unet.likelihood(r'C:\set\rgb\0.png', r'C:\set\drawn\0.png', 0.5, 1)
    assert found == wanted


def test_a_set_that_is_all_in_val_is_split_as_typed_and_asked_about_its_films(tmp_path):
    names = [f'film{k}_{n}' for k in range(4) for n in range(6)]
    fill(tmp_path, *([f'{kind}/val/{name}.png' for name in names] for kind in ('images', 'masks')))
    _, data = inspect(tmp_path, val_fraction=0.5)
    assert split_sizes(data) == [12, 12, 0]
    assert 'no effect' not in str(data.notes) and 'begin in groups' in str(data.notes)


def test_the_whole_path_of_the_data_is_its_top_folder(tmp_path):
    fill(tmp_path, [f'{n}.jpg' for n in range(4)],
         [f'{kind}/{n}.png' for kind in ('labels', 'overlays') for n in range(4)])
    data = inspect(tmp_path, images=str(tmp_path), masks=f'{tmp_path}/labels')[1]
    assert len(data.pairs.images) == 4 and '0.jpg' not in str(data.notes)


def test_groups_that_are_offered_may_be_typed_where_test_images_are_named_otherwise(tmp_path):
    names = [f'train/{{}}/scan_{k:02}_{n}.png' for k in range(6) for n in range(5)]
    names += [f'test/{{}}/{n:03}.png' for n in range(4)]
    fill(tmp_path, *([name.format(kind) for name in names] for kind in ('images', 'masks')))
    note, = [note for note in inspect(tmp_path)[1].notes if 'group_pattern' in note]
    assert split_sizes(inspect(tmp_path, **typed(note.split(' type ')[1]))[1]) == [25, 5, 4]


def test_one_list_named_after_a_split_alone_hides_no_others(tmp_path):
    """val.txt was taken alone, and what test_list.txt names was trained on."""
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    for name, listed in (('train_list', '01234'), ('val', '56'), ('test_list', '7')):
        (tmp_path / f'{name}.txt').write_text('\n'.join(listed))
    assert split_sizes(inspect(tmp_path)[1]) == [5, 2, 1]


def test_a_list_that_names_its_split_last_hides_behind_none(tmp_path):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    for name, listed in (('train_list', '01234'), ('val', '56'), ('my_test', '7')):
        (tmp_path / f'{name}.txt').write_text('\n'.join(listed))
    assert split_sizes(inspect(tmp_path)[1]) == [5, 2, 1]


def test_lists_beside_the_one_that_tells_the_split_are_told(tmp_path):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    (tmp_path / 'val.txt').write_text('5\n6\n')
    (tmp_path / 'test_list.csv').write_text('image\n7\n4\n')
    assert 'ignored test_list.csv' in str(inspect(tmp_path)[1].notes)


def test_only_test_images_may_lack_their_group(tmp_path):
    names = [f'train/{{}}/{group}_{n}.png' for group in 'ab' for n in range(3)] + ['val/{}/a_9.png', 'test/{}/000.png']
    fill(tmp_path, *([name.format(kind) for name in names] for kind in ('images', 'masks')))
    assert '1 of 2 groups of images' in str(inspect(tmp_path, group_pattern='^[ab]')[1].notes)
    fill(tmp_path, ['val/images/7.png'], ['val/masks/7.png'])
    assert 'val/images/7.png; every name must hold it' in str(ask(tmp_path, group_pattern='^[ab]'))


def test_all_masks_of_a_folder_count_in_what_is_drawn_twice(tmp_path):
    for n, first in itertools.product(range(12), (0, 1)):
        mask = np.zeros((24, 24))
        mask[2 * n:2 * n + 2, first:first + 20] = 255
        save(tmp_path / f'{n}_{first}.png', mask)
    assert train_unet.share_drawn_twice(tmp_path, train_unet.CONFIG) == 19 / 21


def test_a_test_csv_of_another_encoding_stops_no_training(tmp_path):
    fill(tmp_path, [f'{n}.jpg' for n in 'abcd'], [f'q{n}.png' for n in range(3, 31, 7)])
    write_lists(tmp_path, train=[(f'{n}.jpg', f'q{7 * k + 3}.png') for k, n in enumerate('abcd')])
    (tmp_path / 'test.csv').write_bytes('id,patient\n7,Müller\n'.encode('cp1252'))
    assert len(inspect(tmp_path / 'train.csv')[1].pairs.images) == 4
    assert 'train.csv' in str(ask(tmp_path))


@pytest.mark.parametrize('name', ['labels/{}_overlay.jpg', 'labels/{}_color.png'])
def test_pictures_of_masks_are_not_offered_as_images(tmp_path, name):
    """The images themselves are of a kind that is not read."""
    (tmp_path / 'images').mkdir()
    for n in range(6):
        mask, picture = 255 * (np.mgrid[:32, :32][0] > 10 + n), np.random.default_rng(n).integers(0, 255, (32, 32, 3))
        (tmp_path / f'images/{n}.dcm').write_bytes(b'x')
        save(tmp_path / f'labels/{n}.png', mask)
        save(tmp_path / name.format(n), np.dstack([mask, picture[..., 1:]]))
    assert 'image_pattern=' not in str(ask(tmp_path))


def test_two_pictures_in_the_top_folder_are_not_all_there_is(tmp_path):
    fill(tmp_path, ['logo.png', 'legend.png', *(f'images/{n}.png' for n in range(4))],
         [f'masks/{n}.png' for n in range(4)])
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_no_pattern_is_offered_of_a_mask_whose_name_lacks_that_of_its_image(tmp_path):
    for n in range(4):
        save(tmp_path / f'images/img_{n}.png', np.random.default_rng(n).integers(0, 256, (8, 8, 3)))
        objects(tmp_path / 'masks', [f'gt_{n}_mask.png', f'gt_{n}_mask_1.png'])
    note, = [note for note in inspect(tmp_path)[1].notes if 'take one kind' in note]
    assert 'mask_pattern=' not in note


def test_the_example_of_a_group_pattern_can_be_typed_in_any_shell(tmp_path):
    fill(tmp_path, [f'images/{n}.png' for n in range(4)], [f'masks/{n}.png' for n in range(4)])
    assert 'as in group_pattern="^[^_]*" (' in str(ask(tmp_path, group_pattern='^[ab]'))


def test_names_of_many_parts_make_no_pattern_that_takes_for_ever():
    letters = 'abcdefghijklmnopqrst'
    found = train_unet.name_patterns('-'.join(letters) + '#', ['_'.join(letters) + '@'])
    assert all(first.count('{stem}') < 7 for first, _ in found)


@pytest.mark.parametrize('lists', [{'val': '89'}, {'train': '01234567', 'val': '89'}])
def test_a_folder_for_testing_stays_so_beside_text_files_that_do_not_list_it(tmp_path, lists):
    """With val.txt alone its images were trained on."""
    fill(tmp_path, *([*(f'{kind}/{n}.png' for n in range(10)), f'test/{kind}/a.png', f'test/{kind}/b.png']
                     for kind in ('images', 'masks')))
    for name, listed in lists.items():
        (tmp_path / f'{name}.txt').write_text('\n'.join(listed))
    _, data = inspect(tmp_path)
    assert [names_of(data, split) for split in ('train', 'val', 'test')] == [{*'01234567'}, {*'89'}, {*'ab'}]


def test_a_text_file_for_testing_alone_may_name_an_image_without_a_mask(tmp_path):
    fill(tmp_path, [f'images/x{n}.png' for n in range(10)], [f'masks/x{n}.png' for n in range(9)])
    (tmp_path / 'test.txt').write_text('x7\nx8\nx9\n')
    assert names_of(inspect(tmp_path, skip_unpaired=True)[1], 'test') == {'x7', 'x8'}


def test_a_list_of_whole_paths_is_split_by_the_folders_in_it(tmp_path):
    """dev/ above all of it was taken for validation, no split was seen, and images of test/ were trained on."""
    rows = [[f'{tmp_path}/dev/{split}/{kind}/{split}{n}.png' for kind in ('images', 'masks')]
            for split, count in (('train', 4), ('val', 1), ('test', 1)) for n in range(count)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, list=rows)
    assert split_sizes(inspect(tmp_path / 'list.csv')[1]) == [4, 1, 1]


def test_the_split_of_a_run_is_repeated_with_its_groups_of_folders(tmp_path):
    names = [f'p{p}/{n:03}.png' for p in range(5) for n in range(3)]
    fill(tmp_path / 'set', *([f'{kind}/{name}' for name in names] for kind in ('images', 'masks')))
    pairs = inspect(tmp_path / 'set', group_pattern='^(p[0-9])/')[1].pairs
    (tmp_path / 'split.csv').write_text(train_unet.split_csv(pairs))
    again = inspect(tmp_path / 'split.csv', group_pattern='^(p[0-9])/')[1].pairs
    assert {*again.images[again.rows('val')]} == {*pairs.images[pairs.rows('val')]}


def test_the_split_of_a_run_is_repeated_with_its_groups_of_stems(tmp_path):
    """They are what {stem} stands for, in the list that the run wrote as in its folder."""
    names = [f'{p:03}_{n}.png' for p in range(5) for n in range(3)]
    fill(tmp_path / 'set', [f'images/scan_{name}' for name in names], [f'masks/lbl_{name}' for name in names])
    wish = {'image_pattern': 'scan_{stem}.png', 'mask_pattern': 'lbl_{stem}.png', 'group_pattern': '^[0-9]+'}
    pairs = inspect(tmp_path / 'set', **wish)[1].pairs
    (tmp_path / 'split.csv').write_text(train_unet.split_csv(pairs))
    again = inspect(tmp_path / 'split.csv', **wish)[1]
    assert {*again.pairs.images[again.pairs.rows('val')]} == {*pairs.images[pairs.rows('val')]}
    assert 'several sides' not in str(again.notes)


def test_folders_whose_names_hold_the_word_for_images_are_groups_too(tmp_path):
    names = [f'p{p}_{{}}/{n}.png' for p in range(5) for n in range(4)]
    fill(tmp_path, *([name.format(kind) for name in names] for kind in ('images', 'masks')))
    pairs = inspect(tmp_path, group_pattern='(.*)/')[1].pairs
    held = [os.path.dirname(path) for path in pairs.images[pairs.rows('val')]]
    assert len(held) == 4 and len({*held}) == 1


@pytest.mark.parametrize('name, code', [('TEST.TXT', 'utf-8'), ('test.txt', 'utf-16')])
def test_lists_of_a_split_as_windows_writes_them(tmp_path, name, code):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    (tmp_path / name).write_text('6.png\r\n7.png\r\n', code)
    assert names_of(inspect(tmp_path)[1], 'test') == {'6', '7'}


def test_lists_with_spaces_in_their_names_that_belong_together_get_one_line(tmp_path):
    rows = [(f'scans/p{n}.jpg', f'drawn/q{n * 7 % 10}.png') for n in range(10)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, **{'my train': rows[:8], 'my val': rows[8:]})
    assert [line for line in typed_lines(ask(tmp_path)) if '.csv' in line] == [f'data="{tmp_path}/my train.csv"']


def test_a_link_that_tells_more_than_its_folder_names_it(tmp_path):
    """zips/p1 and zips/p2 were met before train and val that lead there: the split was lost without a word."""
    names = [f'zips/p{p}/{{}}/p{p}_{n}.png' for p in (1, 2) for n in range(6)]
    fill(tmp_path, *([name.format(kind) for name in names] for kind in ('images', 'masks')))
    for link, place in {'train': 'zips/p1', 'val': 'zips/p2'}.items():
        (tmp_path / link).symlink_to(place)
    assert split_sizes(inspect(tmp_path)[1]) == [6, 6, 0]


def test_folders_that_links_name_as_images_and_masks_pair(tmp_path):
    fill(tmp_path, [f'raw/a/{n}.png' for n in range(4)], [f'raw/b/{n}.png' for n in range(4)])
    (tmp_path / 'images').symlink_to('raw/a')
    (tmp_path / 'masks').symlink_to('raw/b')
    assert len(inspect(tmp_path)[1].pairs.images) == 4


def test_a_blank_text_file_beside_a_folder_for_testing_is_said_to_tell_nothing(tmp_path):
    fill(tmp_path, *([*(f'{kind}/{n}.png' for n in range(10)), f'test/{kind}/a.png'] for kind in ('images', 'masks')))
    (tmp_path / 'val.txt').write_text('\n')
    notes = str(inspect(tmp_path)[1].notes)
    assert 'split by the text files' not in notes and 'ignored val.txt' in notes


@pytest.mark.parametrize('pattern', ['/(p[0-9])/', 'pat/(p[0-9])/', '^.*/pat/(p[0-9])'])
def test_groups_of_a_list_of_whole_paths_may_be_told_from_all_of_the_path(tmp_path, pattern):
    rows = [[f'{tmp_path}/pat/p{p}/{kind}/{n}.png' for kind in ('images', 'masks')] for p in range(5) for n in range(3)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, list=rows)
    assert split_sizes(inspect(tmp_path / 'list.csv', group_pattern=pattern)[1]) == [12, 3, 0]


def test_a_list_of_a_folder_for_training_that_holds_one_for_validation(tmp_path):
    rows = [[f'train/{inner}{kind}/{n}{inner[:1]}.png' for kind in ('images', 'masks')]
            for inner, count in (('', 6), ('val/', 3)) for n in range(count)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, list=rows)
    assert split_sizes(inspect(tmp_path / 'list.csv')[1]) == [6, 3, 0]


@pytest.mark.parametrize('count', [6, 7])
def test_names_of_some_parts_do_make_a_pattern(count):
    letters = 'abcdefg'[:count]
    assert bool(train_unet.name_patterns('-'.join(letters) + '#', ['_'.join(letters) + '@'])) == (count < 7)


def test_a_list_of_relative_paths_keeps_its_folders_for_groups(tmp_path):
    rows = [[f'set/p{p}/{kind}/{n}.png' for kind in ('images', 'masks')] for p in range(5) for n in range(3)]
    fill(tmp_path, *zip(*rows))
    write_lists(tmp_path, list=rows)
    assert split_sizes(inspect(tmp_path / 'list.csv', group_pattern='^set/(p[0-9])')[1]) == [12, 3, 0]


def test_a_text_file_that_names_pictures_of_another_folder_tells_no_split_alone(tmp_path):
    fill(tmp_path, [f'images/x{n}.png' for n in range(8)] + ['other/y.png'], [f'masks/x{n}.png' for n in range(8)])
    (tmp_path / 'val.txt').write_text('x6\nx7\ny\n')
    assert 'ignored val.txt' in str(inspect(tmp_path)[1].notes)


def test_a_list_of_a_split_in_utf_16_of_the_other_byte_order(tmp_path):
    fill(tmp_path, *([f'{kind}/{n}.png' for n in range(8)] for kind in ('images', 'masks')))
    (tmp_path / 'test.txt').write_text('\ufeff6.png\n7.png\n', 'utf-16-be')
    assert names_of(inspect(tmp_path)[1], 'test') == {'6', '7'}


# --- advice that can be followed ------------------------------------------------------


def test_unions_of_masks_that_overlap_somewhere_are_not_offered(tmp_path):
    for n in range(6):
        save(tmp_path / f'images/im{n}.png', np.zeros((16, 16, 3)) + n)
        for k in (1, 2):
            mask = np.zeros((16, 16))
            row = 2 if n == 2 or k == 1 else 9
            mask[row:row + 4, 2:9] = 255
            save(tmp_path / f'masks/im{n}_{k}.png', mask)
    lines = typed_lines(ask(tmp_path))
    assert lines and not any('*' in line for line in lines)
    for line in lines:
        inspect(tmp_path, **typed(line))


def test_a_pattern_in_place_of_a_folder_keeps_what_the_names_end_in(tmp_path):
    save(tmp_path / 'x_sat.jpg', np.zeros((16, 16, 3)))
    assert offered(ask(tmp_path / '*_sat.jpg'), 'image_pattern') == 'image_pattern="{stem}_sat.jpg"'


def test_several_tasks_are_told_with_what_one_of_them_needs(tmp_path):
    for n in range(10):
        save(tmp_path / f'images/{n}.png', np.random.default_rng(n).integers(0, 255, (16, 16, 3)))
        save(tmp_path / f'masks/{"cars" if n % 2 else "trees"}/{n}.png', 255 * np.eye(16))
    note = next(note for note in inspect(tmp_path)[1].notes if 'several tasks' in note)
    assert 'images=' in note and 'skip_unpaired=True' in note
