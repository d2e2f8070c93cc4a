"""Using a model: load, predict, evaluate, and pictures.

Run: python -m pytest tests/test_using.py
"""
import ast
import contextlib
import errno
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
import tifffile
import torch

import train_unet as tu
from conftest import ENOUGH, FORKS, TINY, as_words, draw_set, run_script
from helpers import as_float, as_png, coded_set, edited, eyes, save, train_own, two_kinds

pytestmark = pytest.mark.usefixtures('one_thread')


def written(folder):
    """The files below a folder, by their names in it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


def save_images(folder, *names):
    """Small images under these names -> the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        array = np.random.default_rng(number).integers(0, 255, (40 + number, 50, 3), dtype=np.uint8)
        PIL.Image.fromarray(array).save(folder / name)
    return folder


# --- load -----------------------------------------------------------------------------


def test_load_takes_paths_pictures_arrays_and_tensors(two):
    run, data = two
    model, path = tu.load(run), data / 'images' / '003.png'
    picture = PIL.Image.open(path)
    array = np.array(picture)
    tensor = torch.tensor(array).permute(2, 0, 1)
    masks = [model.predict(x) for x in (path, str(path), picture, array, tensor, tensor / 255, (tensor / 255).half())]
    assert masks[0].shape == (40, 40) and masks[0].dtype == np.uint8 and 0 < masks[0].mean() < 1
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    for wrong in (tensor.float(), tensor[None] / 255, array / 255):        # 0 to 255 in floats; a batch; an array
        with pytest.raises(tu.DataError, match='8-bit images|3 x height x width'):
            model.predict(wrong)


def test_a_torch_device_and_a_single_path_are_taken_from_python(two, tmp_path):
    """train() takes a torch.device; one path is not a list of its letters."""
    run, data = two
    assert tu.load(run, device=torch.device('cpu')).threshold == tu.load(run, 'cpu').threshold
    for number, path in enumerate([data / 'images' / '003.png', str(data / 'images' / '003.png')]):
        assert tu.predict(run, path, tmp_path / str(number)) == 0
        assert written(tmp_path / str(number)) == ['003.png']


@pytest.mark.parametrize('call', [
    lambda run, data: tu.evaluate(run, tta='False'), lambda run, data: tu.export(run, format='smp', half='False'),
    lambda run, data: tu.predict(run, data, tta='False'), lambda run, data: tu.predict(run, data, skip_existing=1),
    lambda run, data: tu.load(run).predict(data / '000.png', tta='False'),
    lambda run, data: tu.load(run).probabilities(data / '000.png', tta='False')])
def test_from_python_too_a_flag_is_true_or_false(two, call):
    """'False' was true: metrics.json of mirrored images, weights in float16."""
    run, data = two
    before = {path: path.stat().st_mtime for path in tu.Path(run).rglob('*')}
    with pytest.raises(tu.ConfigError, match="='False': must be True or False|=1: must be True or False"):
        call(run, data / 'images')
    assert {path: path.stat().st_mtime for path in tu.Path(run).rglob('*')} == before


@pytest.mark.parametrize('call, meant', [
    (lambda run, data: tu.evaluate(run, spilt='test'), 'split'),
    (lambda run, data: tu.predict(run, data, treshold=0.3), 'threshold')])
def test_from_python_too_words_of_a_command_are_suggested(two, call, meant):
    with pytest.raises(tu.ConfigError, match=f"did you mean '{meant}'"):
        call(two[0], two[1] / 'images')


@pytest.mark.parametrize('content', [b'', bytes(99)])
def test_a_checkpoint_without_content_is_damaged_whatever_its_name(content, tmp_path):
    (tmp_path / 'best.ckpt').write_bytes(content)
    with pytest.raises(tu.UserError, match='best.ckpt is damaged'):
        tu.load(tmp_path / 'best.ckpt')


def test_where_best_pt_is_damaged_or_gone_the_last_weights_are_named(two, tmp_path):
    own = shutil.copytree(two[0], tmp_path / 'run')
    named = f'{own}/last.pt holds the last weights'
    (own / 'best.pt').write_bytes(bytes(99))
    with pytest.raises(tu.UserError, match=f'best.pt is damaged.*; {named}'):
        tu.evaluate(own)
    (own / 'best.pt').unlink()
    with pytest.raises(tu.UserError, match="did you mean 'last.pt'"):
        tu.evaluate(own)
    (own / 'other.pt').write_bytes(bytes(99))
    with pytest.raises(tu.UserError, match='other.pt is damaged: [^;]*$'):
        tu.evaluate(own / 'other.pt')
    (own / 'last.pt').unlink()
    with pytest.raises(tu.UserError, match='holds a best.pt once an epoch is done'):
        tu.evaluate(own)


@pytest.mark.parametrize('run, told', [('nowhere', 'nowhere: there is no such file'),
                                       ('.', 'best.pt: there is no such file; a run folder holds a best.pt once')])
def test_a_run_that_is_not_there_is_told_in_words(run, told, capsys):
    assert tu.main(['evaluate', run]) == 2
    said = capsys.readouterr().err
    assert told in said and 'Errno' not in said


@pytest.mark.parametrize('channels_last', [True, False])
def test_a_network_works_in_the_layout_that_was_asked_for(small_set, channels_last):
    """Batches come in channels_last, images that are predicted in either: with False all of it was in channels_last but
    the weights, and evaluate rounded otherwise than training did."""
    seen, first = set(), lambda module, inputs: seen.add((
        inputs[0].is_contiguous(memory_format=torch.channels_last), inputs[0].is_contiguous())) \
        if isinstance(module, torch.nn.Conv2d) and module.in_channels == 3 else None
    with torch.nn.modules.module.register_module_forward_pre_hook(first):
        result = tu.train(data=str(small_set), **{**TINY, 'num_epochs': 1, 'channels_last': channels_last})
        model = tu.load(result.run_dir)
        for size in ((1, 3, 64, 64), (2, 3, 64, 64)):
            for layout in (torch.contiguous_format, torch.channels_last):
                model(torch.zeros(size, dtype=torch.uint8).contiguous(memory_format=layout))
        tu.evaluate(result.run_dir)
    assert seen == {(channels_last, not channels_last)}


def test_a_loaded_model_predicts_as_the_trained_one_does_in_16_bits(small_set):
    """channels_last, too, is part of how it was trained: 16-bit kernels round otherwise in another layout."""
    result = tu.train(data=str(small_set), **{**TINY, 'use_amp': True, 'amp_dtype': 'bfloat16', 'image_size': 64,
                                              'num_epochs': 1})
    loaded = tu.load(result.run_dir)
    weight = loaded.network.segmentation_head[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    images = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8)
    trained, again = (tu.UnderAutocast(model, 'bfloat16')(images) for model in (result.model, loaded))
    assert torch.equal(trained, again)


def test_a_result_predicts_in_the_precision_that_healing_arrived_at(two, tmp_path):
    result = tu.train(**{**ENOUGH, 'num_epochs': 1, 'use_amp': True, 'amp_dtype': 'float16', 'std': 1e-6,
                         'mean': 0.0, 'max_bad_steps': 1}, data=str(two[1]), run_dir=str(tmp_path / 'run'))
    image = two[1] / 'images' / '001.png'
    assert result.model.config['amp_dtype'] != 'float16'
    assert np.array_equal(result.model.predict(image), tu.load(tmp_path / 'run').predict(image))


@pytest.mark.parametrize('units, dtype', [(set(), 'float32'), ({'bfloat16'}, 'bfloat16')])
def test_what_a_gpu_decided_is_not_obeyed_without_its_units(two, tmp_path, monkeypatch, caplog, units, dtype):
    """A run in 16 bits predicts in float32 on a laptop that would need ten times the time, and says so."""
    path = tmp_path / 'best.pt'
    saved = tu.load_checkpoint(two[0] / 'best.pt')
    saved['config'] |= {'use_amp': True, 'amp_dtype': 'bfloat16'}
    tu.save_checkpoint(path, saved)
    monkeypatch.setattr(tu, 'cpu_units', lambda: frozenset(units))
    caplog.set_level('INFO')
    model = tu.load(path, 'cpu')
    assert tu.resolve_precision(model.config, tu.detect_hardware(torch.device('cpu'))).dtype == dtype
    assert ('was trained in bfloat16, for which this machine has no units' in caplog.text) == (dtype == 'float32')


def test_a_run_in_bfloat16_is_not_used_in_float16(two, tmp_path, monkeypatch):
    """On a T4 it might overflow, and what is not finite becomes background."""
    saved = tu.load_checkpoint(two[0] / 'best.pt')
    for trained, units, dtype in (('bfloat16', {'float16'}, 'float32'), ('float16', {'bfloat16'}, 'bfloat16'),
                                  ('float16', {'float16'}, 'float16')):
        tu.save_checkpoint(tmp_path / 'best.pt', saved | {
            'config': saved['config'] | {'use_amp': True, 'amp_dtype': trained}})
        hardware = tu.Hardware('cuda', 'T4', units=frozenset(units))
        with monkeypatch.context() as patch:
            patch.setattr(tu, 'detect_hardware', lambda device: hardware)
            model = tu.load(tmp_path / 'best.pt', 'cpu')
        assert tu.resolve_precision(model.config, hardware).dtype == dtype


def test_float32_typed_for_a_run_in_16_bits_has_no_note_on_a_dtype(two, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tu, 'cpu_units', lambda: frozenset({'bfloat16'}))
    copy = shutil.copytree(two[0], tmp_path / 'run')
    for name in ('best.pt', 'last.pt'):
        saved = tu.load_checkpoint(copy / name)
        saved['config'] |= {'use_amp': True, 'amp_dtype': 'bfloat16'}
        tu.save_checkpoint(copy / name, saved)
    model, _, dtype = tu.load_with(copy, {'use_amp': False}, 'evaluate')
    assert dtype == 'float32' and 'no effect' not in caplog.text
    tu.load_with(copy, {'use_amp': False, 'amp_dtype': 'bfloat16'}, 'evaluate')
    assert 'no effect' in caplog.text


def test_predicting_with_a_model_in_train_mode_changes_nothing(two):
    """BatchNorm would take the statistics of the one image, and keep them."""
    model, image = tu.load(two[0]), np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    mask, before = model.predict(image), {key: value.clone() for key, value in model.state_dict().items()}
    assert np.array_equal(mask, model.train().predict(image))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_second_stage_on_data_of_ones_own_is_not_loaded_but_told(two, tmp_path):
    """Its config names neither encoder nor image_size: 'makes no model: image_size auto' was said."""
    train_own(tu.load(two[0]), lambda model, batch: model(torch.zeros(len(batch['image']), 3, 32, 32)).mean((1, 2, 3)),
              num_epochs=1, run_dir=str(tmp_path / 'second'))
    with pytest.raises(tu.UserError, match='holds a network of your own; build it'):
        tu.load(tmp_path / 'second')


def test_a_model_is_float32_whatever_default_type_a_notebook_has_set(two):
    image = two[1] / 'images' / '003.png'
    mask = tu.load(two[0]).predict(image)
    torch.set_default_dtype(torch.float64)
    try:
        assert np.array_equal(mask, tu.load(two[0]).predict(image))
    finally:
        torch.set_default_dtype(torch.float32)


# --- images as they come: depth, channels, rotation -----------------------------------


@pytest.mark.filterwarnings('error')
def test_an_array_that_may_not_be_written_is_predicted_without_a_warning(two):
    """As numpy.asarray makes of a picture: torch warned of undefined behaviour, once in a process."""
    model = tu.load(two[0])
    array = np.asarray(PIL.Image.new('RGB', model.config['image_size'][::-1]))
    torch.set_warn_always(True)
    try:
        assert not array.flags.writeable and model.predict(array).shape == array.shape[:2]
    finally:
        torch.set_warn_always(False)


def test_alpha_rotation_and_tensors_do_not_change_the_mask(two):
    model = tu.load(two[0])
    array = np.array(PIL.Image.open(two[1] / 'images' / '003.png'))[:, :36]
    mask = model.predict(array)
    assert mask.shape == (40, 36) and 0 < mask.mean() < 1
    alpha = np.dstack([array, np.full((40, 36), 200, np.uint8)])
    turned = PIL.Image.fromarray(np.ascontiguousarray(np.rot90(array)))
    turned.getexif()[274] = 6                                          # a camera held upright
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in (array, alpha)]
    for image in (alpha, PIL.Image.fromarray(alpha), turned, *tensors):
        assert np.array_equal(model.predict(image), mask)


def test_colours_are_greyed_alike_as_arrays_and_as_pictures(tmp_path):
    """in_channels=1: the weights are those of Pillow, the type stays."""
    colours = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    config = {**tu.CONFIG, 'in_channels': 1, 'image_dtype': 'uint8'}
    as_array, as_picture = (tu.as_image(image, config) for image in (colours, PIL.Image.fromarray(colours)))
    assert as_array.dtype == np.uint8
    assert np.abs(as_array[..., 0].astype(int) - as_picture.reshape(16, 16)).max() <= 1


@pytest.mark.parametrize('wider', [np.int64, np.int32, np.int16])
def test_whole_numbers_up_to_255_are_an_8_bit_image(two, wider):
    model = tu.load(two[0])
    image = np.array(PIL.Image.open(two[1] / 'images' / '001.png'))
    assert np.array_equal(model.predict(image.astype(wider)), model.predict(image))


def test_the_command_and_python_read_a_wide_array_alike(two, tmp_path):
    image = np.asarray(PIL.Image.open(next((two[1] / 'images').iterdir()))).astype(np.int64)
    np.save(tmp_path / 'wide.npy', image)
    assert tu.main(['predict', str(two[0]), str(tmp_path / 'wide.npy'), '-o', str(tmp_path / 'out')]) == 0
    mask = np.asarray(PIL.Image.open(tmp_path / 'out' / 'wide.png'))
    assert (mask > 0).tolist() == (tu.load(two[0]).predict(image) > 0).tolist()


def test_shallow_images_of_a_deep_set_are_resized_as_evaluate_does():
    """First the type, then the size: else predict would round where evaluate does not."""
    config = {**tu.CONFIG, 'image_dtype': 'float32', 'image_size': [8, 8], 'batch_size': 2, 'use_amp': False}
    seen = []

    class Watching(torch.nn.Module):
        threshold = 0.5

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images):
            seen.append(images)
            return images[:, :1]

    Watching.config = config
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3)).astype(np.uint8)
    list(tu.predict_stream(Watching(), [('x', tu.as_image(image, config))]))
    wanted = tu.resize(image.astype(np.float32) / 255, 8, 8)
    assert torch.equal(seen[0][0], torch.from_numpy(wanted).permute(2, 0, 1))


@pytest.mark.parametrize('shape', [(40, 40), (40, 40, 3)], ids=['grey', 'colour'])
def test_an_image_of_16_bits_is_not_predicted_as_black(two, tmp_path, capsys, shape):
    deep = np.random.default_rng(0).integers(0, 65535, shape, dtype=np.uint16)
    tu.cv2.imwrite(str(tmp_path / 'deep.png'), deep)
    assert tu.predict(two[0], [str(tmp_path / 'deep.png')], tmp_path / 'out') == 1
    assert 'deep.png: holds 16-bit or float pixels' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    model = tu.load(two[0])
    for image in (deep, deep / 65535.0, tmp_path / 'deep.png'):
        with pytest.raises(tu.DataError, match='16-bit or float pixels'):
            model.predict(image)


@pytest.mark.parametrize('image, words', [(255 * torch.rand(3, 8, 8).bfloat16(), 'holds 16-bit or float pixels'),
                                          (np.zeros((0, 5, 3), np.uint8), r'an image of shape \(0, 5, 3\)')],
                         ids=['bf16', 'empty'])
def test_what_is_no_image_for_this_network_is_told_in_words(two, image, words):
    with pytest.raises(tu.DataError, match=words):
        tu.load(two[0]).predict(image)


def test_a_trained_network_is_not_advised_to_take_other_channels(two):
    with pytest.raises(tu.DataError) as error:
        tu.load(two[0]).predict(np.zeros((8, 8, 7), np.uint8))
    assert 'has 7 channels, in_channels=3' in str(error.value) and 'type' not in str(error.value)
    with pytest.raises(tu.UserError, match='has 50 channels, in_channels=3; arrays are height x width x channels'):
        tu.load(two[0]).predict(np.zeros((3, 40, 50), np.uint8))
    with pytest.raises(tu.UserError, match='has 40 channels, in_channels=3; .*tensors channels first'):
        tu.load(two[0]).predict(torch.zeros((40, 50, 3), dtype=torch.uint8))


def test_a_result_stands_for_its_run_folder(two):
    result = tu.Result([], {}, None, tu.Path(two[0]))
    image = np.zeros((40, 50, 3), np.uint8)
    assert (tu.load(result).predict(image) == tu.load(two[0]).predict(image)).all()


def test_images_stored_otherwise_than_those_trained_on_are_told(tmp_path, capsys, caplog):
    """float32 of 0 to 255 in training; the same pictures of 8 bits become 0 to 1."""
    folder = two_kinds(tmp_path / 'set', as_float(255), as_float(255))
    result = tu.train(data=str(folder), in_channels=1, **{**TINY, 'image_size': 32})
    two_kinds(tmp_path / 'other', as_png, as_png)
    says = "stored as uint8, what was trained on as float32; is the scale the same?"
    for command, told in ((['predict', str(folder / 'images')], 0), (['predict', str(tmp_path / 'other/images')], 1),
                          (['evaluate', f'data={tmp_path / "other"}'], 1)):
        caplog.clear()
        tu.main([command[0], str(result.run_dir), *command[1:]])
        assert caplog.text.count(says) == told


def test_images_of_both_depths_that_were_trained_on_are_no_others(tmp_path, caplog):
    """8 and 16 bits in one set, all of which become 0 to 1; floats may be of another scale."""
    as_deep = lambda path, pixels: save(path.with_suffix('.png'), pixels.astype(int) * 257, 'I;16')
    folder = two_kinds(tmp_path / 'set', as_png, as_deep)
    result = tu.train(data=str(folder), in_channels=1, **{**TINY, 'image_size': 32})
    two_kinds(tmp_path / 'floats', as_float(1), as_float(1))
    for images, told in ((folder, 0), (tmp_path / 'floats', 1)):
        caplog.clear()
        tu.main(['predict', str(result.run_dir), str(images / 'images')])
        assert caplog.text.count('is the scale the same?') == told


# --- predict: which files -------------------------------------------------------------


def test_paths_may_be_path_objects(own, two, tmp_path):
    assert tu.predict(own, [two[1] / 'images' / '001.png'], tmp_path / 'o') == 0
    assert written(tmp_path / 'o') == ['001.png']


def test_one_file_in_two_spellings_is_one_file(two, tmp_path):
    save_images(tmp_path / 'p', 'a.jpg')
    assert tu.predict(two[0], ['p/a.jpg', './p/a.jpg'], 'out') == 0
    assert written(tmp_path / 'out') == ['a.png']


def test_names_that_differ_in_case_alone_get_masks_in_folders_of_their_own(two, tmp_path):
    """On Windows and macOS they are one name, and the second mask replaced the first."""
    save_images(tmp_path / 'p', 'IMG.png')
    save_images(tmp_path / 'q', 'img.png')
    assert tu.predict(two[0], [str(tmp_path / 'p'), str(tmp_path / 'q')], tmp_path / 'out') == 0
    assert written(tmp_path / 'out') == ['p/IMG.png', 'q/img.png']


def test_a_typed_keep_float32_is_at_work_in_evaluate(two, tmp_path, monkeypatch):
    """It was told as if, and two equal scores were compared."""
    loaded, real = [], torch.nn.Module.eval
    monkeypatch.setattr(torch.nn.Module, 'eval', lambda model: loaded.append(model) or real(model))
    shutil.copytree(two[0], tmp_path / 'copy')
    tu.evaluate(tmp_path / 'copy', keep_float32='segmentation_head', use_amp=True, amp_dtype='bfloat16')
    [model] = {model for model in loaded if isinstance(model, tu.SegmentationModel)}
    seen = []
    model.network.segmentation_head[0].register_forward_hook(lambda layer, given, out: seen.append(out.dtype))
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert seen == [torch.float32]


def test_a_pattern_with_an_equals_sign_is_a_path(two, tmp_path):
    save_images(tmp_path / 'run=3', 'a.png')
    assert tu.main(['predict', str(two[0]), 'run=3/*.png', '-o', 'out']) == 0
    assert written(tmp_path / 'out') == ['a.png']


def test_the_home_folder_may_be_typed_as_a_tilde_for_predict_and_export(two, tmp_path, monkeypatch):
    """A shell expands it after a space, but not in --out=~/masks: that made a folder of this name."""
    save_images(tmp_path / 'p', 'a.jpg')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert tu.main(['predict', str(two[0]), '~/p', '--out=~/masks']) == 0
    assert tu.main(['export', str(two[0]), 'format=smp', '--out=~/smp']) == 0
    assert (tmp_path / 'masks/a.png').exists() and (tmp_path / 'smp/config.json').exists()


def test_a_file_typed_by_name_is_tried_whatever_its_suffix(two, tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('no image')
    image = two[1] / 'images' / '001.png'
    shutil.copy(image, tmp_path / 'photo.upload')
    inputs = [str(tmp_path / 'notes.txt'), str(tmp_path / 'photo.upload'), str(image)]
    assert tu.predict(two[0], inputs, tmp_path / 'out') == 1
    said = capsys.readouterr().err
    assert 'notes.txt' in said and '1 file could not be predicted' in said
    assert written(tmp_path / 'out') == ['001.png', 'photo.png']
    assert tu.predict(two[0], inputs[:1], tmp_path / 'none') == 1
    said = capsys.readouterr().out
    assert said.startswith('0 masks') and 'Next' not in said


def test_an_empty_list_of_images_is_an_error(two, tmp_path):
    """As glob.glob gives it for a folder that is spelt wrong."""
    with pytest.raises(tu.UserError, match='the list of images is empty'):
        tu.predict(two[0], [], tmp_path)


def test_a_folder_without_images_is_an_error(two, tmp_path):
    (tmp_path / 'empty').mkdir()
    image = str(two[1] / 'images' / '001.png')
    with pytest.raises(tu.UserError, match='empty: holds no image, or masks of predict'):
        tu.predict(two[0], [image, str(tmp_path / 'empty')], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    tu.predict(two[0], [image], tmp_path / 'out')
    with pytest.raises(tu.UserError, match='out: holds no image, or masks of predict alone'):
        tu.predict(two[0], [str(tmp_path / 'out')], tmp_path / 'again')
    assert tu.predict(two[0], [str(tmp_path / 'out' / '001.png')], tmp_path / 'again') == 0


def test_masks_of_an_earlier_time_are_no_images(two):
    PIL.Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save('photo.jpg')
    for _ in range(2):
        assert tu.main(['predict', str(two[0]), '.', '-o', 'masks']) == 0
    assert [path.name for path in Path('masks').rglob('*.*')] == ['photo.png']


def test_a_pipe_among_the_images_is_not_waited_for(two, tmp_path, make_pipe, capsys):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    make_pipe(folder / 'log')
    assert tu.predict(two[0], [str(folder)], tmp_path / 'out') == 0
    make_pipe(folder / 'b.png')
    assert tu.predict(two[0], [str(folder)], tmp_path / 'again') == 1 and written(tmp_path / 'again') == ['a.png']
    assert 'b.png: cannot be read: is no file' in capsys.readouterr().err


def test_every_file_that_cannot_be_predicted_is_named(two, tmp_path, capsys):
    for number in range(12):
        (tmp_path / f'{number}.png').write_text('no picture')
    assert tu.main(['predict', str(two[0]), str(tmp_path), '-o', str(tmp_path / 'out')]) == 1
    told = capsys.readouterr().err
    assert all(f'{number}.png' in told for number in range(12))


# --- predict: what is written, and where ----------------------------------------------


def test_predict_keeps_names_and_size_and_survives_a_broken_file(two, tmp_path, capsys):
    run, data = two
    folder = tmp_path / 'mine' / 'deeper'
    folder.mkdir(parents=True)
    PIL.Image.new('RGB', (61, 33)).save(folder / 'a photo.jpg')
    (folder / 'broken.png').write_bytes(b'no image')
    assert tu.predict(run, [str(tmp_path / 'mine')], tmp_path / 'out') == 1
    assert PIL.Image.open(tmp_path / 'out' / 'deeper' / 'a photo.png').size == (61, 33)
    assert 'broken.png' in capsys.readouterr().err


def test_masks_of_several_classes_are_said_to_look_black(two, three, tmp_path, capsys):
    """0 to 2 of 255: the commonest cry of all."""
    for (run, data), how, is_said in (two, 'mask', 0), (three, 'mask', 1), (three, 'palette', 0):
        assert tu.predict(run, [str(data / 'images' / '003.png')], tmp_path / f'{run.name}-{how}', save=how) == 0
        assert capsys.readouterr().out.count('class numbers, 0 to 2, which look black; save=palette') == is_said


@pytest.mark.parametrize('save, mode', [('mask', 'L'), ('palette', 'P'), ('overlay', 'RGB'), ('probability', 'L')])
def test_what_predict_can_save(two, tmp_path, save, mode):
    run, data = two
    tu.predict(run, [str(data / 'images' / '001.png')], tmp_path, save=save, tta=True)
    picture = PIL.Image.open(tmp_path / '001.png')
    assert picture.mode == mode and picture.size == (40, 40)
    assert len(np.unique(np.array(picture))) > (1 if save in ('mask', 'palette') else 2)


def test_predict_takes_another_threshold_than_the_stored_one(two, three, tmp_path, capsys):
    run, data = two
    file = str(data / 'images' / '001.png')
    assert tu.predict(run, [file], tmp_path, save='probability') == 0
    chance = np.array(PIL.Image.open(tmp_path / '001.png'))
    middle = int(np.median(chance))
    level = (middle + 0.5) / 255                                       # where it is rounded up
    stored = tu.load(run).threshold
    assert tu.main(['predict', str(run), file, '-o', str(tmp_path), f'threshold={level}']) == 0
    mask = np.array(PIL.Image.open(tmp_path / '001.png'))
    assert np.array_equal(mask == 255, chance > middle) and 0 < (mask == 255).mean() < 1
    assert tu.load(run).threshold == stored
    for kind in (np.float64, np.float32):                              # of np.linspace; of model.probabilities
        assert tu.predict(run, file, tmp_path / kind.__name__, threshold=kind(level)) == 0
        assert np.array_equal(np.array(PIL.Image.open(tmp_path / kind.__name__ / '001.png')), mask)
    for typed in ('1.5', '0', 'high'):
        assert tu.main(['predict', str(run), file, '-o', str(tmp_path), f'threshold={typed}']) == 2
        assert 'must be above 0 and below 1' in capsys.readouterr().err
    assert tu.main(['predict', str(three[0]), file, '-o', str(tmp_path), 'threshold=0.4']) == 2
    assert 'threshold=0.4: is for masks of two classes alone; leave it out' in capsys.readouterr().err
    assert tu.main(['predict', str(run), file, '-o', str(tmp_path), 'threshold=0.4', 'save=probability']) == 2


def test_probabilities_from_python_decide_as_predict_does(two, three):
    for (run, data), bands in ((two, 1), (three, 3)):
        model, file = tu.load(run), str(data / 'images' / '001.png')
        chances, mask = model.probabilities(file), model.predict(file)
        assert chances.shape == (bands, *mask.shape) and chances.dtype == np.float32
        assert np.array_equal(chances[0] > model.threshold if bands == 1 else chances.argmax(0), mask)
        assert bands == 1 or np.allclose(chances.sum(0), 1, atol=1e-5)
        assert not np.array_equal(model.probabilities(file, tta=True), chances)


def test_an_array_given_to_predict_is_sent_to_the_model(two):
    with pytest.raises(tu.UserError, match=r'load\(RUN\).predict\(array\)'):
        tu.predict(two[0], np.zeros((40, 40, 3), np.uint8))
    with pytest.raises(tu.UserError, match=r'load\(RUN\).predict\(array\)'):
        tu.predict(two[0], PIL.Image.new('RGB', (40, 40)))


def test_paths_come_from_a_generator_too(two, tmp_path):
    assert tu.predict(two[0], (two[1] / 'images').glob('00[12].png'), tmp_path / 'out') == 0
    assert written(tmp_path / 'out') == ['001.png', '002.png']


def test_probabilities_of_several_classes_are_bands_of_a_tiff(three, tmp_path):
    file = str(three[1] / 'images' / '003.png')
    assert tu.predict(three[0], [file], tmp_path, save='probability') == 0
    assert written(tmp_path) == ['003.tif']
    chances = tifffile.imread(tmp_path / '003.tif')
    assert chances.shape == (40, 40, 3) and chances.dtype == np.uint8
    assert np.abs(chances.sum(2, dtype=int) - 255).max() <= 2
    mask = tu.load(three[0]).predict(file)
    assert len(np.unique(mask)) > 1 and (chances.argmax(2) == mask).mean() > 0.95


def test_a_batch_predicts_what_single_images_predict(two, tmp_path):
    run, data = two
    model = tu.load(run)
    images = [(i, np.array(PIL.Image.open(data / 'images' / f'{i:03d}.png'))) for i in range(5)]
    sizes = []
    hook = model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    together = [mask for _, _, mask in tu.decide_stream(model, images)]
    assert sizes == [4, 1]                                             # TINY's batch_size is 4
    hook.remove()
    assert all(np.array_equal(mask, model.predict(image)) for mask, (_, image) in zip(together, images))


def test_masks_go_where_out_says(own, two, tmp_path):
    assert tu.main(['predict', str(own), str(two[1] / 'images' / '001.png'), '--out', str(tmp_path / 'o')]) == 0
    assert written(tmp_path / 'o') == ['001.png']


@pytest.fixture
def namesakes(two, tmp_path):
    """Two folders that hold different images of the same name."""
    for folder, number in (('a', 1), ('b', 2)):
        (tmp_path / 'mine' / folder).mkdir(parents=True)
        shutil.copy(two[1] / 'images' / f'{number:03d}.png', tmp_path / 'mine' / folder / 'x.png')
    return tmp_path / 'mine'


@pytest.mark.parametrize('inputs', [['mine/a', 'mine/b'], ['mine/**/*.png'], ['mine/[ab]'],
                                    ['mine/a/x.png', 'mine/b/x.png']], ids=str)
def test_images_of_one_name_in_two_folders_give_two_masks(two, namesakes, tmp_path, inputs):
    assert tu.predict(two[0], inputs, tmp_path / 'out') == 0
    assert written(tmp_path / 'out') == ['a/x.png', 'b/x.png']
    model = tu.load(two[0])
    for name in ('a/x.png', 'b/x.png'):
        mask = np.array(PIL.Image.open(tmp_path / 'out' / name)) // 255
        assert np.array_equal(mask, model.predict(namesakes / name))


@pytest.mark.parametrize('names', [('a.png', 'a.jpg', 'a.jpg.png', 'a.jpg.png.png'), ('A.jpg', 'a.png')], ids=str)
def test_no_mask_takes_the_place_of_another(two, tmp_path, names):
    """Many disks take A.png and a.png for one file."""
    folder = save_images(tmp_path / 'p', *names)
    assert tu.predict(two[0], [str(folder)], tmp_path / 'out') == 0
    assert len({name.casefold() for name in written(tmp_path / 'out')}) == len(names)
    sizes = {PIL.Image.open(tmp_path / 'out' / name).size for name in written(tmp_path / 'out')}
    assert sizes == {(50, 40 + number) for number in range(len(names))}


def test_predict_never_writes_over_the_images(two, capsys):
    """photo.png and -o . would be the same file."""
    PIL.Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save('photo.png')
    before = Path('photo.png').read_bytes()
    assert tu.main(['predict', str(two[0]), 'photo.png', '-o', '.']) == 2
    assert 'would be overwritten' in capsys.readouterr().err and Path('photo.png').read_bytes() == before
    assert tu.main(['predict', str(two[0]), 'photo.png', '-o', 'photo.png']) == 2
    assert 'name a folder' in capsys.readouterr().err
    assert tu.main(['predict', str(two[0]), 'photo.png', '-o', 'out/one.png']) == 2 and not Path('out').exists()


def test_photographs_in_the_folder_of_the_masks_stay(two, tmp_path):
    """An image that is no input; one in a folder inside the inputs, which is no mask of an earlier time."""
    beside = save_images(tmp_path / 'q', 'a.png', 'a.jpg')
    inside = save_images(tmp_path / 'r', 'a.jpg')
    save_images(inside / 's', 'a.png')
    for inputs, output in (([beside / 'a.jpg'], beside), ([inside], inside / 's')):
        before = (output / 'a.png').read_bytes()
        with pytest.raises(tu.UserError, match='would be overwritten'):
            tu.predict(two[0], list(map(str, inputs)), output)
        assert (output / 'a.png').read_bytes() == before


@pytest.mark.parametrize('save', ['mask', 'palette', 'overlay', 'probability'])
def test_masks_of_an_earlier_time_are_written_anew(two, tmp_path, save):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    for _ in range(2):
        assert tu.predict(two[0], [str(folder)], folder / 'masks', save=save) == 0
    assert written(folder) == ['a.jpg', 'masks/a.png']


def test_a_tiff_of_an_earlier_time_is_written_anew(three, tmp_path):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    for _ in range(2):
        assert tu.predict(three[0], [str(folder)], folder / 'masks', save='probability') == 0
    assert written(folder) == ['a.jpg', 'masks/a.tif']


def test_a_mask_that_cannot_be_written_costs_no_other(two, tmp_path, capsys):
    folder = save_images(tmp_path / 'p', 'a.png', 'x' * 250 + '.png', 'z.png')
    (tmp_path / 'out' / 'a.png').mkdir(parents=True)
    assert tu.predict(two[0], [str(folder)], tmp_path / 'out') == 1
    assert written(tmp_path / 'out') == ['x' * 250 + '.png', 'z.png']
    assert 'a.png: cannot be written' in capsys.readouterr().err


def test_a_folder_for_masks_that_cannot_be_made_is_told_once_at_the_first_mask(two, tmp_path, capsys):
    (tmp_path / 'file').touch()
    images = [str(tmp_path / f'p/{name}') for name in written(save_images(tmp_path / 'p', 'a.png', 'b.png'))]
    assert tu.main(['predict', str(two[0]), *images, '-o', str(tmp_path / 'file/masks')]) == 2
    assert capsys.readouterr().err.splitlines() == [f'{tmp_path}/file/masks: Not a directory']


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_predict_that_is_ended_in_the_middle_of_a_file_leaves_none_of_it(two, forks, number):
    """As a scheduler, or a terminal that is closed, ends it, while the first mask is on its way to the disk."""
    words = ['predict', str(two[0]), str(two[1] / 'images'), '-o', 'masks']
    end = f'import os, signal\nsignal.signal({number}, signal.SIG_DFL)\n' \
          f'os.fsync = lambda file: os.kill(os.getpid(), {number})\n'
    process = FORKS.Process(target=run_script, args=(words, 'said.txt', {}, end))
    process.start()
    process.join(120)
    process.kill()
    process.join()
    assert process.exitcode == 128 + number and os.listdir('masks') == [], Path('said.txt').read_text()


# --- predict: large images ------------------------------------------------------------


@pytest.mark.parametrize('layout', [{'tile': (32, 48), 'compression': 'zlib'}, {'rowsperstrip': 7, 'predictor': True,
                                    'compression': 'zlib'}, {'rowsperstrip': 150}, {}])
@pytest.mark.parametrize('policy', ['resize', 'crop'])
def test_a_large_tiff_is_read_and_written_by_rows(two, tmp_path, monkeypatch, layout, policy):
    """The mask equals that of the same image read whole, and no call asks for more rows than a tile needs."""
    run, _ = two
    image = np.random.default_rng(0).integers(0, 255, (150, 170, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / 'big.tif', image, photometric='rgb', **layout)
    settings = {'size_policy': policy, 'image_size': [64, 64]}
    for kind in ('mask',) if layout else ('mask', 'palette', 'overlay', 'probability'):
        tu.predict(run, [str(tmp_path / 'big.tif')], tmp_path / 'whole', save=kind, **settings)
        asked, original = [], tu.TiffRows.__getitem__
        monkeypatch.setattr(tu.TiffRows, '__getitem__',
                            lambda self, rows: asked.append(rows.stop - rows.start) or original(self, rows))
        monkeypatch.setattr(tu, 'WINDOWED_ABOVE', 1000)
        assert tu.predict(run, [str(tmp_path / 'big.tif')], tmp_path / 'rows', save=kind, **settings) == 0
        monkeypatch.undo()
        written = tifffile.imread(tmp_path / 'rows' / 'big.tif')
        assert np.array_equal(written, np.array(PIL.Image.open(tmp_path / 'whole' / 'big.png')))
        assert asked and (policy == 'resize' or max(asked) <= 64)


def test_an_overlay_on_8_bits_asks_for_no_contrast(two, tmp_path, monkeypatch):
    """It is not stretched; to look for its limits decoded a large TIFF twice."""
    monkeypatch.delattr(tu, 'contrast')
    monkeypatch.setattr(tu, 'WINDOWED_ABOVE', 1000)
    tifffile.imwrite(tmp_path / 'x.tif', np.zeros((64, 64, 3), np.uint8), photometric='rgb')
    assert tu.predict(two[0], [str(tmp_path / 'x.tif')], tmp_path / 'out', save='overlay') == 0


def test_a_large_tiff_of_one_bit_is_an_8_bit_image(two, tmp_path, monkeypatch):
    monkeypatch.setattr(tu, 'WINDOWED_ABOVE', 100)
    tifffile.imwrite(tmp_path / 'x.tif', np.random.default_rng(0).random((64, 64)) > 0.5, photometric='minisblack')
    assert tu.predict(two[0], [str(tmp_path / 'x.tif')], tmp_path / 'out') == 0


def test_a_large_tiff_that_breaks_further_down_costs_no_other(two, tmp_path, monkeypatch, capsys):
    run, data = two
    image = np.random.default_rng(0).integers(0, 255, (150, 170, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / 'big.tif', image, photometric='rgb', rowsperstrip=10, compression='zlib')
    content = bytearray((tmp_path / 'big.tif').read_bytes())
    with tifffile.TiffFile(tmp_path / 'big.tif') as file:
        begin = file.pages[0].dataoffsets[9]
    content[begin:begin + 200] = b'x' * 200
    (tmp_path / 'big.tif').write_bytes(content)
    monkeypatch.setattr(tu, 'WINDOWED_ABOVE', 1000)
    inputs = [str(tmp_path / 'big.tif'), str(data / 'images' / '001.png')]
    assert tu.predict(run, inputs, tmp_path / 'out', size_policy='crop', image_size=[64, 64]) == 1
    assert 'big.tif' in capsys.readouterr().err
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['001.png']


def test_a_large_tiff_of_another_depth_that_comes_first_costs_no_other(two, tmp_path, monkeypatch, capsys):
    """Its first row was read outside of what guards the writing of a mask."""
    tifffile.imwrite(tmp_path / 'big.tif', np.full((64, 64), 1000, np.int16), photometric='minisblack')
    monkeypatch.setattr(tu, 'WINDOWED_ABOVE', 1000)
    inputs = [str(tmp_path / 'big.tif'), str(two[1] / 'images' / '001.png')]
    assert tu.predict(two[0], inputs, tmp_path / 'out', size_policy='crop', image_size=[64, 64]) == 1
    assert 'big.tif: holds 16-bit or float pixels' in capsys.readouterr().err
    assert written(tmp_path / 'out') == ['001.png']


# --- settings of predict and evaluate -------------------------------------------------


def test_image_size_may_be_one_number_for_predict_and_evaluate(two, own, tmp_path, capsys):
    typed = ['size_policy=crop', 'image_size=48']
    file = tmp_path / 'wide.png'
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(file)
    assert tu.main(['predict', str(own), str(file), '-o', str(tmp_path / 'out'), *typed]) == 0
    assert PIL.Image.open(tmp_path / 'out' / 'wide.png').size == (90, 70)
    assert tu.main(['evaluate', str(own), *typed]) == 0
    assert '2 val images' in capsys.readouterr().out


@pytest.mark.parametrize('verb, word', [('evaluate', 'num_classes=4'), ('predict', 'image_dtype=float32'),
                                        ('predict', 'mean=1.0'), ('predict', 'std=2.0')])
def test_what_belongs_to_the_network_cannot_be_typed_for_its_use(two, verb, word, capsys):
    """More classes than it was trained for would only give zeros."""
    what = f'data={two[1]}' if verb == 'evaluate' else str(two[1] / 'images')
    assert tu.main([verb, str(two[0]), what, word]) == 2
    assert f'{word.split("=")[0]}: belongs to the trained network' in capsys.readouterr().err


@pytest.mark.parametrize('ask', [lambda run: tu.evaluate(run, num_epochs=3),
                                 lambda run: tu.predict(run, 'photo.jpg', epochs=3)])
def test_settings_of_training_are_refused_from_python_too(two, ask):
    with pytest.raises(tu.ConfigError, match='epochs=3: (evaluate|predict) has no use for it'):
        ask(two[0])


def test_other_data_need_not_have_the_groups_of_a_run(small_set, tmp_path):
    """group_pattern was looked for in their names, and could not be taken back: no effect there."""
    run = tu.train(**TINY, data=str(small_set), group_pattern='^0(..)').run_dir
    other = draw_set(tmp_path / 'other', count=4)
    for folder, n in itertools.product(('images', 'masks'), range(4)):
        (other / f'{folder}/{n:03d}.png').rename(other / f'{folder}/{"abcd"[n]}.png')
    assert tu.main(['evaluate', str(run), f'data={other}']) == 0


def test_folders_of_a_run_may_be_taken_back_for_other_data(small_set, tmp_path, capsys):
    run = tu.train(**TINY, data=str(small_set), images='images', masks='masks').run_dir
    other = draw_set(tmp_path / 'other', count=4)
    (other / 'images').rename(other / 'photos')
    assert tu.main(['evaluate', str(run), f'data={other}']) == 2
    assert 'images=none masks=none' in capsys.readouterr().err
    assert tu.main(['evaluate', str(run), f'data={other}', 'images=none', 'masks=none']) == 0


def test_a_gpu_may_be_named_by_its_number_where_a_model_is_loaded(two):
    with pytest.raises(tu.ConfigError, match="device='cuda:15': this machine has only"):
        tu.load(two[0], 15)


def test_a_folder_for_masks_under_a_name_of_the_command_line_is_refused_from_python(two):
    with pytest.raises(tu.ConfigError, match='out=.masks.: predict has no use for it'):
        tu.predict(two[0], 'photo.jpg', out='masks')


@pytest.mark.parametrize('use', [tu.evaluate, lambda run: tu.export(run, 'smp', 'smp'), lambda run: tu.predict(
    run, json.loads(Path(run, 'metrics.json').read_text())['images'][0]['file'], 'masks', size_policy='crop')])
def test_what_a_notebook_has_set_changes_no_use_of_a_run(own, use):
    tu.evaluate(own)
    torch.set_default_device('meta')
    try:
        use(own)
        assert torch.empty(0).device.type == 'meta'
    finally:
        torch.set_default_device(None)


def test_data_at_the_top_of_a_drive_are_other_data(own, tmp_path, monkeypatch):
    """D:/ has no name, and without one the scores were taken for the run's own, its threshold tuned on them."""
    def at_the_top(folder, model, *how, real=tu.images_to_score):
        found = real(folder, model, *how)
        model.config['data'] = os.path.abspath('/')
        return found

    monkeypatch.setattr(tu, 'images_to_score', at_the_top)
    tu.store_threshold(own, 0.35, tu.load(own))
    (own / 'metrics.json').write_text('as it was')
    tu.evaluate(own, data=str(draw_set(tmp_path / 'other', count=8, seed=1)))
    assert (own / 'metrics.json').read_text() == 'as it was' and tu.load(own).threshold == 0.35
    assert (own / 'evaluation_drive' / 'metrics.json').exists()


def test_scores_are_printed_though_matplotlib_is_broken(own, monkeypatch, capsys, caplog):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    (own / 'confusion.png').touch()                                    # of an earlier time
    assert tu.main(['evaluate', str(own)]) == 0
    assert 'the pictures could not be written' in caplog.text
    told = capsys.readouterr().out
    assert re.search(r'val images: IoU 0\.\d', told) and told.count(': metrics.json\n') == 1


def test_weights_that_are_exported_or_begun_with_are_not_said_to_lack_units(two, tmp_path, monkeypatch, caplog):
    """They are loaded on the CPU, whatever GPU the training is for."""
    saved = tu.load_checkpoint(two[0] / 'best.pt')
    saved['config'] |= {'use_amp': True, 'amp_dtype': 'bfloat16'}
    tu.save_checkpoint(tmp_path / 'best.pt', saved)
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    caplog.set_level('INFO')
    assert tu.export(tmp_path / 'best.pt', 'smp', tmp_path / 'smp') == 0
    tu.train(**TINY | {'num_epochs': 1}, data=str(two[1]), initial_weights=str(tmp_path / 'best.pt'))
    assert 'has no units' not in caplog.text
    tu.load(tmp_path / 'best.pt', 'cpu')
    assert 'has no units' in caplog.text


def test_a_mask_corrected_by_hand_is_left_where_new_images_are_predicted(two, tmp_path):
    """No editor keeps the mark of predict."""
    folder = save_images(tmp_path / 'p', 'a.jpg', 'b.jpg')
    assert tu.predict(two[0], str(folder / 'a.jpg'), tmp_path / 'out') == 0
    PIL.Image.new('L', (50, 40)).save(tmp_path / 'out' / 'a.png')
    before = (tmp_path / 'out' / 'a.png').read_bytes()
    assert tu.predict(two[0], str(folder), tmp_path / 'out', skip_existing=True) == 0
    assert written(tmp_path / 'out') == ['a.png', 'b.png'] and (tmp_path / 'out' / 'a.png').read_bytes() == before
    images = save_images(tmp_path / 'q', 'a.png')
    for words in ({}, {'skip_existing': True}):                        # the images are no masks of themselves
        with pytest.raises(tu.UserError, match='would be overwritten'):
            tu.predict(two[0], str(images), images, **words)


@pytest.mark.parametrize('side, told', [(40, 'such images predict tiles of 40 pixels'),
                                        (64, 'such images type size_policy=crop')])
def test_an_image_of_which_tiles_were_trained_on_is_told(own, tmp_path, caplog, side, told):
    """A whole field was shrunk to the size of a tile, and its mask was empty, without a word."""
    with edited(own / 'best.pt') as saved:
        assert saved['side'] == 40
        saved['side'] = side
    pixels = np.zeros((20, 2 * side + 1, 3), np.uint8)
    for name, width in (('a', 2 * side), ('b', 2 * side + 1), ('c', 2 * side + 1)):
        PIL.Image.fromarray(pixels[:, :width]).save(tmp_path / f'{name}.png')
    files = [str(tmp_path / f'{name}.png') for name in 'abc']
    assert tu.predict(own, files, tmp_path / 'out') == 0
    assert caplog.text.count('are shrunk to image_size') == 1 and f'b.png: its {2 * side + 1} pixels' in caplog.text
    assert told in caplog.text
    caplog.clear()
    tu.predict(own, files, tmp_path / 'more', size_policy='crop')
    tu.predict(own, files, tmp_path / 'enlarged', image_size=256)
    assert 'are shrunk' not in caplog.text


@pytest.mark.parametrize('side', ['x', [1], torch.tensor([1, 2])], ids=str)
def test_a_side_that_is_no_number_is_not_asked(own, tmp_path, side):
    with edited(own / 'best.pt') as saved:
        saved['side'] = side
    assert tu.predict(own, str(save_images(tmp_path / 'p', 'a.jpg')), tmp_path / 'out') == 0


def test_masks_of_broken_images_are_in_place_of_none(two, tmp_path, capsys):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    assert tu.predict(two[0], str(folder), tmp_path / 'out') == 0
    (folder / 'a.jpg').write_bytes(b'x')
    assert tu.predict(two[0], str(folder), tmp_path / 'out') == 1
    assert 'in place of' not in capsys.readouterr().out


def test_what_is_left_out_of_a_folder_is_told(two, tmp_path, caplog):
    """A telephone's HEIC were left out without a word, with exit code 0."""
    folder = save_images(tmp_path / 'p', 'a.jpg')
    (folder / 'deeper').mkdir()
    (folder / 'deeper' / 'b.HEIC').write_bytes(b'x')
    (folder / '.DS_Store').write_bytes(b'x')
    assert tu.predict(two[0], str(folder), tmp_path / 'out') == 0
    assert 'left out: deeper/b.HEIC' in caplog.text and 'DS_Store' not in caplog.text
    assert written(tmp_path / 'out') == ['a.png']
    caplog.clear()
    assert tu.predict(two[0], f'{folder}/a.*', tmp_path / 'out', skip_existing=True) == 0
    assert 'left out' not in caplog.text


def test_pictures_above_4_gb_are_written_as_bigtiff(tmp_path, monkeypatch):
    """tifffile does so by itself where nothing is compressed."""
    seen, model = [], SimpleNamespace(config={'num_classes': 3}, threshold=0.5)
    monkeypatch.setattr(tifffile, 'imwrite', lambda *_, bigtiff=None, **__: seen.append(bigtiff))
    for side in (1000, 50_000):
        tu.write_prediction(tmp_path / 'x.png', SimpleNamespace(shape=(side, side, 3)), [], model, 'probability')
    assert seen == [False, True]


def test_an_overlay_is_stretched_by_the_bands_that_it_shows(tmp_path):
    """A fourth band, of heights in metres, made photographs black."""
    image = np.linspace(0.2, 0.4, 100, dtype=np.float32)[:, None, None].repeat(40, 1).repeat(4, 2)
    image[..., 3] = 800
    model = SimpleNamespace(config={'num_classes': 2}, threshold=0.5)
    tu.write_prediction(tmp_path / 'x.png', image, torch.full((1, 1, 100, 40), -5.0), model, 'overlay')
    assert np.array(PIL.Image.open(tmp_path / 'x.png'))[-1, 0, 0] > 250


def test_the_score_below_an_image_stays_on_the_page_however_long_its_path(tmp_path):
    """Of nuclei_dsb2018 as it is published both folder and file have 64 letters; scores were cut off."""
    page = lambda score: tu.sheet([(64 * 'a' + '/images/' + 64 * 'a' + score, [np.zeros((8, 8, 3), np.uint8)] * 4)],
                                  ['image'] * 4, tmp_path / 'x.png').tobytes()
    assert page('   IoU 0.100') != page('   IoU 0.900')


def test_names_of_classes_that_the_network_does_not_know_are_refused(two, capsys):
    assert tu.main(['evaluate', str(two[0]), 'class_names=[a, b, c]', 'device=cpu']) == 2
    assert '3 names for 2 classes, 0 to 1' in capsys.readouterr().err


@pytest.mark.parametrize('word', ['seed=5', 'val_fraction=0', 'group_pattern=^.'])
def test_evaluate_draws_no_other_validation_images(own, word, capsys):
    assert tu.main(['evaluate', str(own), word]) == 2
    assert 'would draw other validation images' in capsys.readouterr().err


@pytest.mark.parametrize('word', ['seed=5', 'group_pattern=^.'])
def test_a_split_of_other_data_that_is_not_drawn_takes_no_words(own, tmp_path, word, capsys):
    """They were listed as at work, beside the scores of all images."""
    other = draw_set(tmp_path / 'other', count=4)
    assert tu.main(['evaluate', str(own), f'data={other}', word]) == 2
    assert f'{word.split("=")[0]}: no effect: data= is scored whole' in capsys.readouterr().err


def test_a_run_that_validated_on_its_training_images_is_scored_as_that(small_set, capsys):
    """'8 val images', also in metrics.json, of a run without any."""
    run = tu.train(**TINY, data=str(small_set), val_fraction=0).run_dir
    assert tu.main(['evaluate', str(run)]) == 0
    assert re.search('^[0-9]+ train images: IoU', capsys.readouterr().out, re.MULTILINE)
    assert json.loads(Path(run, 'metrics.json').read_text())['split'] == 'train'
    assert tu.main(['evaluate', str(run), 'split=val']) == 2
    assert 'has no val images with masks' in capsys.readouterr().err


# --- starting from another run --------------------------------------------------------


def test_a_run_starts_from_the_weights_of_another(own, two, tmp_path, monkeypatch):
    """On data of its own, in a step too small to move them; the network is that of the first run, and a resume does
    not need it any more."""
    monkeypatch.chdir(tmp_path)
    first = tu.load_checkpoint(own / 'best.pt')['weights']
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')}
    how |= {'learning_rate': 1e-12, 'ema_decay': None, 'data': str(draw_set(tmp_path / 'other', 8, seed=3))}
    result = tu.train(**how, initial_weights=str(own))
    weights = tu.load_checkpoint(result.run_dir / 'last.pt')['model']
    kernels = [name for name, value in first.items() if value.ndim == 4 and name.startswith('network.')]
    assert kernels and all(torch.allclose(weights[name], first[name], 0, 1e-9) for name in kernels)
    assert result.model.config['encoder'] == TINY['encoder'] and result.model.config['initial_weights'] == str(own)
    again = {'resume': str(result.run_dir), 'initial_weights': os.path.relpath(own)}       # as below SLURM, typed again
    shutil.rmtree(own)
    assert len(tu.train(**again, num_epochs=3).history) == 3


@pytest.mark.parametrize('mean, std, is_kept', [(100, 60, True), (1, 0.1, False)], ids=['known', 'of another scale'])
def test_a_network_goes_on_with_the_mean_and_std_that_it_knows(two, tmp_path, caplog, mean, std, is_kept):
    """Those of pretrained weights were measured anew: IoU began at 0.70 where it had been 0.77."""
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')} | {'num_epochs': 1}
    first = tu.train(**TINY | {'num_epochs': 1}, data=str(two[1]), mean=mean, std=std)
    for given in {'initial_weights': str(first.run_dir)}, {'model': first.model}:
        caplog.clear()
        config = tu.train(**how, data=str(two[1]), **given).model.config
        assert ((config['mean'], config['std']) == ([mean], [std])) == is_kept, given
        assert f'({"of the network that goes on" if is_kept else "of the training images"})' in caplog.text, given


def test_images_of_other_channels_have_a_mean_of_their_own(two, caplog):
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')}
    result = tu.train(**how | {'num_epochs': 1}, data=str(two[1]), initial_weights=str(two[0]), in_channels=1)
    assert len(result.model.config['mean']) == 1 and '(of the training images)' in caplog.text


def test_other_classes_get_a_last_layer_of_their_own(own, three, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    how = TINY | {'learning_rate': 1e-12, 'ema_decay': None, 'data': str(three[1])}
    result = tu.train(**how, initial_weights=str(own / 'best.pt'))
    assert 'new: segmentation_head.0.weight, segmentation_head.0.bias' in caplog.text
    first = tu.load_checkpoint(own / 'best.pt')['weights']
    weights = tu.load_checkpoint(result.run_dir / 'last.pt')['model']
    assert weights['network.segmentation_head.0.weight'].shape[0] == 3
    kernels = [name for name, value in first.items() if value.ndim == 4 and 'segmentation_head' not in name
               and name.startswith('network.')]
    assert kernels and all(torch.allclose(weights[name], first[name], 0, 1e-9) for name in kernels)


@pytest.mark.parametrize('count', [1, 2, 3, 5])
def test_the_first_layer_sees_in_other_channels_what_it_saw(own, count):
    """As smp fits pretrained weights (camvid as grey, 3 epochs at 2e-4: 0.437; with a new first layer 0.338)."""
    first = tu.load(own, 'cpu')
    model = tu.build_model({**first.config, 'in_channels': count, 'mean': [0.0], 'std': [1.0]})
    tu.take_initial(model, {'initial_weights': str(own)})
    before, after = (kind.network.encoder.model.stage0[0] for kind in (first, model))
    assert after.weight.shape == (16, count, 3, 3)
    if count == 1:
        assert torch.equal(after.weight, before.weight.sum(1, keepdim=True))
    else:
        for channel in range(count):
            assert torch.allclose(after.weight[:, channel] * count, before.weight[:, channel % 3] * 3, 0, 1e-6)


def test_the_first_layer_is_fitted_to_other_channels_and_all_others_are_taken(own, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for n in range(4):
        for kind, shape in ('images', (64, 64, 5)), ('masks', (64, 64)):
            (tmp_path / 'bands' / kind).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / 'bands' / kind / f'{n}.npy', np.random.default_rng(n).integers(0, 2, shape, np.uint8))
    how = TINY | {'data': str(tmp_path / 'bands'), 'num_epochs': 1}
    result = tu.train(**how, in_channels=5, initial_weights=str(own))
    assert result.model.config['in_channels'] == 5
    assert 'fitted to other channels: encoder.model.stage0.0.weight; new: none\n' in caplog.text
    again = tu.train(**how, initial_weights=str(result.run_dir))      # untyped, they are those of the run
    assert again.model.config['in_channels'] == 5 and 'new: none' in caplog.text


@pytest.mark.parametrize('words, told', [
    (['initial_weights=FILE'], 'weights of another program go into a network of that kind, which train(model=NETWORK)'),
    (['initial_weights=nowhere'], 'cannot load the model:\n  nowhere: there is no such file'),
    (['initial_weights=RUN', 'encoder=resnet34'], "has 'tu-test_five_convs'; leave encoder out"),
    (['initial_weights=RUN', 'encoder_weights=imagenet'], "encoder_weights='imagenet': the network of initial_weights"),
])
@pytest.mark.parametrize('verb', [[], ['check'], ['tune']])
def test_initial_weights_that_do_not_fit_are_refused(own, two, tmp_path, monkeypatch, verb, words, told, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({'encoder.weight': torch.zeros(1)}, tmp_path / 'smp.pth')
    words = [word.replace('RUN', str(own)).replace('FILE', 'smp.pth') for word in words]
    assert tu.main([*verb, f'data={two[1]}', 'device=cpu', *words]) == 2
    assert told in capsys.readouterr().err and not [*tmp_path.glob('runs/*-*')]


@pytest.mark.parametrize('name, told', [
    ('old.pth', 'old.pth is no checkpoint of this program: it holds something else; weights of another program'),
    ('smp/model.safetensors', 'model.safetensors is no checkpoint of this program: it holds something else; weights'),
    ('photo.png', 'photo.png is no checkpoint of this program'),       # predict photo.png runs/x
    ('model.onnx', 'model.onnx is no checkpoint of this program'), ('log.txt', 'log.txt is no checkpoint of this'),
    ('smp', 'there is no such file; train(model=smp.from_pretrained(FOLDER)) starts from a folder of smp')])
def test_weights_of_other_programs_are_not_called_damaged(tmp_path, name, told):
    """"File is not a zip file; a run folder holds a best.pt once an epoch is done" was said of each."""
    network = tu.smp.Unet('tu-test_resnet', encoder_weights=None, decoder_channels=[8] * 5)
    network.save_pretrained(tmp_path / 'smp')
    torch.save(network.state_dict(), tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    save_images(tmp_path, 'photo.png')
    for file in ('model.onnx', 'log.txt'):                             # what export, and training, wrote
        (tmp_path / file).write_bytes(b'\x08\x08\x12\x07pytorch')
    with pytest.raises(tu.UserError) as caught:
        tu.load(tmp_path / name)
    assert told in str(caught.value) and 'best.pt once' not in str(caught.value)


# --- evaluate: scores -----------------------------------------------------------------


def images_of(run):
    """The validation images of a run, as evaluate names them."""
    return [row['file'] for row in json.loads((run / 'metrics.json').read_text())['images']]


def test_predicted_files_score_what_evaluate_says(own, two, tmp_path):
    """The masks that predict wrote, compared pixel by pixel, give evaluate's IoU at its threshold, exactly."""
    run, data = own, two[1]
    report = tu.evaluate(run)
    assert report == json.loads((run / 'metrics.json').read_text())
    assert tu.load(run).threshold == report['threshold']
    files = images_of(run)
    assert tu.predict(run, files, tmp_path / 'masks') == 0
    counts = 0
    for file in files:
        name = os.path.basename(file)
        mask = np.array(PIL.Image.open(tmp_path / 'masks' / name)) // 255
        truth = np.array(PIL.Image.open(data / 'masks' / name)) // 255
        counts = counts + tu.confusion_matrix(torch.tensor(mask), torch.tensor(truth), 2)
    assert tu.compute_metrics(counts)['iou'] == report['metrics_at_threshold']['iou'] > 0.5
    assert {'worst.png', 'confusion.png', 'metrics.json'} <= {p.name for p in run.iterdir()}


def test_scores_of_single_images_are_written_and_summed_up(own, two, capsys):
    tu.evaluate(own)
    said, rows = capsys.readouterr().out, json.loads((own / 'metrics.json').read_text())['images']
    dice = []
    for row in rows:
        mask = tu.load(own).predict(row['file']) > 0
        truth = np.array(PIL.Image.open(two[1] / 'masks' / os.path.basename(row['file']))) > 0
        dice.append(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))
    assert [row['dice'] for row in rows] == pytest.approx(dice)
    assert f'mean {np.mean(dice):.4f}, standard deviation {np.std(dice):.4f}' in said
    assert f'foreground is met in {sum(value > 0 for value in dice)} of {len(rows)} images that have it' in said


def test_parts_without_a_defect_are_counted_as_alarms_or_not(capsys):
    '''Rows: truth. Found, missed, a false alarm, two sound parts, one that is
    ignored altogether, and one that is nothing but an alarm.'''
    tu.print_detection([[[5, 1], [1, 2]], [[6, 0], [3, 0]], [[8, 1], [0, 0]], [[9, 0], [0, 0]], [[9, 0], [0, 0]],
                        [[0, 0], [0, 0]], [[0, 4], [0, 0]]])
    assert 'is met in 1 of 2 images that have it, invented in 2 of 4 without' in capsys.readouterr().out


def test_a_score_with_other_settings_says_so_and_tunes_no_threshold(own, capsys):
    tu.store_threshold(own, 0.85, tu.load(own))
    assert tu.main(['evaluate', str(own), 'image_size=32', 'device=cpu']) == 0
    assert 'with image_size="[32, 32]"' in capsys.readouterr().out
    assert json.loads((own / 'metrics.json').read_text())['settings'] == {'image_size': [32, 32]}
    assert tu.load(own).threshold == 0.85


def test_scores_are_written_for_a_reader_who_has_left(two, tmp_path, monkeypatch):
    """train_unet.py evaluate runs/x | head -1: nobody reads what is printed, but all is written."""
    shutil.copytree(two[0], tmp_path / 'run')
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, contextlib.suppress(BrokenPipeError), open(writer, 'w', buffering=1) as screen:
        patch.setattr(sys, 'stdout', screen)
        tu.main(['evaluate', str(tmp_path / 'run')])
    tuned = json.loads((tmp_path / 'run' / 'metrics.json').read_text())['threshold']
    assert tu.load_checkpoint(tmp_path / 'run' / 'best.pt')['threshold'] == tuned != 0.5
    assert (tmp_path / 'run' / 'confusion.png').exists()


def test_a_broken_validation_file_is_left_out_of_evaluate_with_skip_broken(own, two, tmp_path, caplog):
    data = shutil.copytree(two[1], tmp_path / 'data')
    config = tu.load(own).config | {'data': str(data)}
    pairs = tu.inspect_data(config).pairs
    path = Path(os.fsdecode(pairs.images[pairs.rows('val')[0]]))
    path.write_bytes(path.read_bytes()[:-200])                         # its header is whole
    assert tu.main(['evaluate', str(own), f'data={data}', 'skip_broken=True']) == 0
    assert f'left out: {path}' in caplog.text
    assert len(json.loads((own / 'evaluation_data' / 'metrics.json').read_text())['images']) == 11


def test_best_weights_that_lie_alone_are_named_in_the_next_line(own, two, tmp_path, capsys):
    alone = shutil.copy(own / 'best.pt', tmp_path / 'alone.pt')
    assert tu.main(['evaluate', str(alone), f'data={two[1]}', 'device=cpu']) == 0
    assert f'predict {alone} YOUR_IMAGES' in capsys.readouterr().out


# --- evaluate: the threshold ----------------------------------------------------------


def test_evaluate_tunes_the_threshold_though_a_device_is_typed(own, capsys):
    (own / 'curves.png').unlink()
    tu.store_threshold(own, 1e-4, tu.load(own))                        # nearly all would be foreground
    assert tu.main(['evaluate', str(own), 'device=cpu']) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[[line.split()[:1] for line in lines].index(['class']):]
    assert [line.split()[0] for line in table[1:4]] == ['background', 'foreground', 'mean']
    assert 'tuned on them' in table[4]
    report = json.loads((own / 'metrics.json').read_text())
    per_class = report['metrics']['iou_per_class']
    assert report['metrics']['mean_iou'] == pytest.approx(sum(per_class) / 2)
    for key in ('mean_dice', 'mean_precision', 'mean_recall'):
        assert 0 <= report['metrics'][key] <= 1
    assert f'{report["metrics"]["mean_recall"]:.3f}' == table[3].split()[-1]
    assert report['threshold'] >= 0.05 and report['metrics_at_threshold']['iou'] >= report['metrics']['iou']
    assert 'left out' in report['empty_masks'] and tu.load(own).threshold == report['threshold']
    assert {'curves.png', 'worst.png', 'confusion.png'} <= set(written(own))


def test_images_that_came_later_do_not_move_the_threshold(two, own, capsys):
    data = shutil.copytree(two[1], own.parent / 'grown')
    for kind in ('images', 'masks'):
        shutil.copy(data / kind / '001.png', data / kind / 'zz.png')
    with edited(own / 'best.pt') as saved, edited(own / 'last.pt') as other:
        saved['config']['data'], saved['threshold'], other['config']['data'] = str(data), 0.85, str(data)
    assert tu.main(['evaluate', str(own)]) == 0
    assert 'not those this run began with' in capsys.readouterr().out
    assert tu.load(own).threshold == 0.85


def test_validation_without_foreground_tunes_nothing(own, two, tmp_path):
    data = shutil.copytree(two[1], tmp_path / 'empty')
    with edited(own / 'best.pt') as saved, edited(own / 'last.pt') as other:
        saved['config']['data'], saved['threshold'], other['config']['data'] = str(data), 0.8, str(data)
    pairs = tu.find_pairs(saved['config'])
    for path in pairs.masks[pairs.rows('val')]:
        PIL.Image.fromarray(np.zeros((40, 40), np.uint8)).save(os.fsdecode(path))
    assert tu.main(['evaluate', str(own)]) == 0
    assert tu.load(own).threshold == 0.8


def test_a_path_that_is_not_there_is_told_with_the_one_that_may_be_meant(own, two, capsys):
    mistyped = str(own)[:-1], str(two[1] / 'image')
    for words, meant in ((['evaluate', mistyped[0]], own.name), (['predict', str(own), mistyped[1]], 'images')):
        assert tu.main(words) == 2
        assert f"there is no such file: did you mean '{meant}'?" in capsys.readouterr().err


def test_scores_are_printed_although_the_disk_does_not_take_them(own, monkeypatch, capsys):
    """A run of a colleague's, or a full disk; the file is named, and what is there stays."""
    before = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', full)
        assert tu.main(['evaluate', str(own)]) == 2
    out, err = capsys.readouterr()
    assert 'No space left on device' in out and 'is not stored' in out
    assert re.search(r'val images: IoU 0\.\d', out) and 'Written to' not in out
    assert err == f'{own / "metrics.json"}: No space left on device\n'
    after = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    assert {**after, '.lock': b''} == {**before, '.lock': b''}


def test_a_threshold_is_not_stored_beside_a_training_that_is_at_work(own, caplog):
    """Whether it holds the folder, or has put other weights there since."""
    from filelock import FileLock
    run = own
    best = tu.load_checkpoint(run / 'best.pt')
    with FileLock(str(run / '.lock')):
        assert tu.main(['evaluate', str(run)]) == 0
    assert 'a training or another evaluate is at work there, so the best threshold' in caplog.text
    assert tu.load_checkpoint(run / 'best.pt')['threshold'] == best['threshold']
    stale = tu.load(run)
    newer = best | {'weights': {key: value + 1 for key, value in best['weights'].items()}, 'epoch': 99}
    tu.save_checkpoint(run / 'best.pt', newer)
    assert not tu.store_threshold(run, 0.7, stale) and tu.store_threshold(run, 0.6, tu.load(run))
    after = tu.load_checkpoint(run / 'best.pt')
    assert (after['epoch'], after['threshold']) == (99, 0.6)


# --- evaluate: other data -------------------------------------------------------------


def test_other_data_is_scored_whole_and_leaves_the_run_as_it_was(own, tmp_path, capsys):
    other = draw_set(tmp_path / 'other', count=8, seed=1)
    tu.store_threshold(own, 0.35, tu.load(own))
    (own / 'metrics.json').write_text('as it was')
    assert tu.main(['evaluate', str(own), f'data={other}']) == 0
    said = capsys.readouterr().out
    assert f'8 images of {other}' in said and 'threshold 0.35' in said
    assert 'no validation images' not in said and 'tuned on them' not in said
    assert tu.load(own).threshold == 0.35 and (own / 'metrics.json').read_text() == 'as it was'
    report = json.loads((own / 'evaluation_other' / 'metrics.json').read_text())
    assert len({row['file'] for row in report['images']}) == 8 and report['threshold'] == 0.35
    assert {'worst.png', 'confusion.png'} <= set(written(own / 'evaluation_other'))
    assert 'worst.png' not in written(own)


def test_evaluate_says_nothing_of_how_often_images_come_in_training(own, tmp_path, capsys):
    data = draw_set(tmp_path / 'cells', 8)
    for n in range(1, 8):
        PIL.Image.new('L', (40, 40)).save(data / f'masks/{n:03d}.png')
    assert tu.main(['check', f'data={data}', 'val_fraction=0', *as_words(TINY)]) == 0
    assert '12% of the training images show foreground: they come more' in capsys.readouterr().out
    assert tu.main(['evaluate', str(own), f'data={data}', 'val_fraction=0']) == 0
    said = capsys.readouterr().out
    assert 'they come more' not in said and 'no validation images' not in said


def test_evaluate_says_nothing_of_groups_to_split(own, tmp_path, capsys):
    data = draw_set(tmp_path / 'cells', 8)
    for folder, n in itertools.product(('images', 'masks'), range(8)):
        (data / f'{folder}/{n:03d}.png').rename(data / f'{folder}/v{n // 4}_{n}.png')
    assert tu.main(['check', f'data={data}', *as_words(TINY)]) == 0 and 'type group_pattern=' in capsys.readouterr().out
    assert tu.main(['evaluate', str(own), f'data={data}']) == 0 and 'group_pattern' not in capsys.readouterr().out


def test_evaluate_says_nothing_of_classes_that_training_would_lack(three, tmp_path, capsys):
    """Other data without splits are no training images, though all of them count as train."""
    data = tmp_path / 'other'
    shutil.copytree(three[1], data)
    for path in (data / 'masks').rglob('*.png'):
        mask = np.array(PIL.Image.open(path))
        PIL.Image.fromarray(np.where(mask == 1, 0, mask).astype(np.uint8)).save(path)
    assert tu.main(['evaluate', str(shutil.copytree(three[0], tmp_path / 'run')), f'data={data}']) == 0
    said = capsys.readouterr().out
    assert 'class' in said and 'no training mask' not in said


def test_evaluate_says_nothing_of_a_val_fraction_that_nobody_typed(own, tmp_path, capsys):
    data = draw_set(tmp_path / 'other', count=8, seed=1)
    for path in sorted(data.glob('*/*.png')):
        target = path.parent / ('val' if path.stem > '005' else 'train') / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    assert tu.main(['evaluate', str(own), f'data={data}']) == 0
    said = capsys.readouterr().out
    assert '2 val images of' in said and 'val_fraction' not in said


def test_other_data_is_scored_at_the_stored_threshold(own, tmp_path, capsys):
    tu.store_threshold(own, 0.9, tu.load(own))
    other = draw_set(tmp_path / 'cells.v1', count=4, seed=3)
    assert tu.main(['evaluate', str(own), f'data={other}']) == 0
    report = json.loads((own / 'evaluation_cells.v1' / 'metrics.json').read_text())
    assert report['metrics'] == report['metrics_at_threshold'] and report['threshold'] == 0.9
    assert f'IoU {report["metrics"]["iou"]:.4f}, Dice' in capsys.readouterr().out


def test_other_data_that_has_only_a_val_folder_is_scored(own, tmp_path, capsys):
    for kind in ('images', 'masks'):
        (tmp_path / 'set').mkdir(exist_ok=True)
        shutil.move(draw_set(tmp_path / f'drawn_{kind}') / kind, tmp_path / 'set' / kind / 'val')
    assert tu.main(['evaluate', str(own), f'data={tmp_path / "set"}']) == 0
    assert f'12 val images of {tmp_path / "set"}' in capsys.readouterr().out


def test_the_test_images_of_a_run_are_scored_at_the_stored_threshold(tmp_path, monkeypatch, capsys):
    """Nothing of it is tuned on them, and the scores of the validation images stay as they are."""
    monkeypatch.chdir(tmp_path)
    for split, count in {'train': 8, 'val': 4, 'test': 5}.items():
        drawn = draw_set(tmp_path / split, count, seed=count)
        for kind in ('images', 'masks'):
            (tmp_path / 'set' / kind).mkdir(parents=True, exist_ok=True)
            shutil.move(drawn / kind, tmp_path / 'set' / kind / split)
    run = tu.train(**TINY, data='set').run_dir
    assert tu.main(['evaluate', str(run)]) == 0
    assert f'evaluate {run} split=test' in capsys.readouterr().out.splitlines()[-1]
    tu.store_threshold(run, 0.35, tu.load(run))
    before = (run / 'metrics.json').read_bytes()
    assert tu.main(['evaluate', str(run), 'split=test']) == 0
    said, report = capsys.readouterr().out, json.loads((run / 'evaluation_test' / 'metrics.json').read_text())
    assert '5 test images of' in said and 'that of the run' in said and said.splitlines()[-1].startswith('Next:  ')
    assert {Path(row['file']).parent.name for row in report['images']} == {'test'} and len(report['images']) == 5
    assert (report['split'], report['threshold']) == ('test', 0.35) == ('test', tu.load(run).threshold)
    assert (run / 'metrics.json').read_bytes() == before and 'split=test' not in said
    model = tu.load(run)
    truth = [np.array(PIL.Image.open(tmp_path / 'set/masks/test' / Path(row['file']).name)) for row in report['images']]
    counts = sum(tu.confusion_matrix(torch.tensor(model.predict(row['file'])), torch.tensor(mask) // 255, 2)
                 for row, mask in zip(report['images'], truth))
    assert tu.compute_metrics(counts)['iou'] == report['metrics']['iou']
    assert tu.main(['evaluate', str(run), 'split=train']) == 0 and '8 train images of' in capsys.readouterr().out
    assert tu.main(['evaluate', str(run), 'data=set', 'split=test']) == 0
    assert '5 test images of' in capsys.readouterr().out and (run / 'evaluation_set_test' / 'worst.png').exists()


def test_a_network_that_knows_left_from_right_sees_no_images_mirrored_sideways(tmp_path):
    run = tu.train(**{**TINY, 'num_epochs': 1}, data=eyes(tmp_path / 'set')).run_dir
    told = 'mirror = False  (class 1 lies left of class 2: mirrored, each would look like the other)'
    assert told in (run / 'log.txt').read_text() and tu.load(run).config['mirror'] is False
    model, image = tu.load(run).double(), np.array(PIL.Image.open(tmp_path / 'set/images/0.png'))
    upright, turned = model.probabilities(image), model.probabilities(image[::-1].copy())[:, ::-1]
    logits = (np.log(upright) + np.log(turned)) / 2
    assert model.probabilities(image, tta=True) == pytest.approx(np.exp(logits) / np.exp(logits).sum(0), abs=1e-4)
    assert tu.train(resume=run, num_epochs=2).model.config['mirror'] is False


def test_evaluate_scores_what_predict_writes_with_flips(own, two, tmp_path, capsys):
    tu.store_threshold(own, 0.85, tu.load(own))
    assert tu.main(['evaluate', str(own), 'tta=True']) == 0
    report = json.loads((own / 'metrics.json').read_text())
    said = capsys.readouterr().out
    assert 'with tta=True' in said and said.rstrip().endswith('YOUR_IMAGES tta=True')
    assert report['settings'] == {'tta': True}
    assert tu.load(own).threshold == report['threshold'] == 0.85
    assert tu.main(['predict', str(own), *images_of(own), '-o', str(tmp_path / 'masks'), 'tta=True']) == 0
    counts = 0
    for file in map(os.path.basename, images_of(own)):
        both = (tmp_path / 'masks' / file, two[1] / 'masks' / file)
        mask, truth = (torch.tensor(np.array(PIL.Image.open(path)) // 255) for path in both)
        counts = counts + tu.confusion_matrix(mask, truth, 2)
    assert tu.compute_metrics(counts)['iou'] == report['metrics_at_threshold']['iou']


def test_a_network_that_learnt_nothing_is_told_and_tunes_no_threshold(own, two, capsys, caplog):
    with edited(own / 'best.pt') as saved:
        saved['weights']['network.segmentation_head.0.bias'].fill_(1e4)
        saved['threshold'] = 0.4
    metrics = tu.evaluate(own)['metrics']                          # all is foreground
    truth = [np.array(PIL.Image.open(two[1] / 'masks' / os.path.basename(path))) > 0 for path in images_of(own)]
    assert metrics['iou'] == metrics['constant_iou'] == pytest.approx(np.mean(truth))
    share = f'{np.mean(truth):.4f}'
    assert f'{share} is not, or hardly, better than that of the same class everywhere, {share}.' in caplog.text
    assert tu.load(own).threshold == 0.4 and 'that of the run' in capsys.readouterr().out
    assert 'More epochs, class_weights=auto (rare foreground), a larger image_size' in caplog.text
    for setting in {'class_weights': 'auto'}, {'loss': 'dice'}:    # it has not helped, or could not
        with edited(own / 'best.pt') as saved:
            saved['config'] |= {'class_weights': None} | setting
        caplog.clear()
        tu.evaluate(own)
        assert 'More epochs, a larger image_size' in caplog.text
    caplog.clear()
    tu.evaluate(own, data=str(two[1]))                             # data of others train nothing here
    assert f'can begin with its weights: initial_weights={own}' in caplog.text and 'More epochs' not in caplog.text


def test_images_that_have_a_mask_may_be_left_out(two, tmp_path, capsys):
    words = [str(two[0]), str(two[1] / 'images'), '-o', str(tmp_path / 'out')]
    assert tu.main(['predict', *words]) == 0
    files = sorted((tmp_path / 'out').iterdir())
    files[3].unlink()
    before = {path: path.stat().st_mtime_ns for path in files if path.exists()}
    assert tu.main(['predict', *words, '--skip-existing']) == 0
    assert re.search(f'1 mask in .*, {len(files) - 1} there already', capsys.readouterr().out)
    assert sorted((tmp_path / 'out').iterdir()) == files and len(before) == len(files) - 1
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert tu.main(['predict', *words, 'skip_existing=1']) == 2
    assert tu.main(['predict', *words]) == 0
    printed = capsys.readouterr()
    assert re.search(f'{len(files)} masks in .*, {len(files)} in place of older ones', printed.out)
    assert 'skip_existing=1: must be True or False' in printed.err


def test_data_that_have_moved_are_asked_for(small_set, capsys):
    run = tu.train(**TINY, data=str(small_set), fold=2).run_dir
    tu.evaluate(run)
    shutil.move(small_set, 'moved')
    assert tu.main(['evaluate', str(run)]) == 2
    words = re.search('is not there; if it has moved type data=NEW_PLACE (.*)', capsys.readouterr().err)[1].split()
    again = tu.evaluate(run, data='moved', **tu.parse_overrides(words)[0])
    names = lambda rows: [os.path.basename(row) for row in rows]
    assert names(row['file'] for row in again['images']) == names(images_of(run))      # the same split


@pytest.mark.parametrize('words, told', [
    (['split=test'], 'has no test images with masks'),
    (['split=tests'], "split='tests': choose from train, val, test"),
    (['data=OTHER', 'split=val'], 'has no val images with masks'),
])
def test_a_split_that_is_not_there_is_refused(own, two, words, told, capsys):
    assert tu.main(['evaluate', str(own), *(word.replace('OTHER', str(two[1])) for word in words)]) == 2
    assert told in capsys.readouterr().err and not [*own.glob('evaluation*')]


def test_the_demo_set_is_other_data_too(own, capsys):
    tu.write_demo(tu.DEMO_FOLDER, num_train=3, num_val=3)
    assert tu.main(['evaluate', str(own), 'data=demo']) == 0
    assert re.search('^3 val images of ', capsys.readouterr().out, re.MULTILINE)        # not drawn again


def test_scores_of_another_set_of_the_same_name_go_elsewhere(own, tmp_path):
    for place in ('a', 'b'):
        assert tu.main(['evaluate', str(own), f'data={draw_set(tmp_path / place / "cells", 4)}']) == 0
    assert tu.main(['evaluate', str(own), f'data={tmp_path / "a" / "cells"}']) == 0
    assert {'evaluation_cells/metrics.json', 'evaluation_cells-2/metrics.json'} <= set(written(own))
    assert not (own / 'evaluation_cells-3').exists()


def test_how_other_data_was_understood_is_told(own, tmp_path, capsys):
    assert tu.main(['evaluate', str(own), f'data={draw_set(tmp_path / "new", values=(0, 1))}']) == 0
    assert '0 is background, 1 foreground' in capsys.readouterr().out


def test_masks_coded_otherwise_than_in_training_are_told(tmp_path, caplog):
    """0, 1 and void in training; the other set holds void and 0 alone, which looks like black and white."""
    for name, top in (('set', 1), ('other', 255)):
        for number in range(8):
            codes = np.zeros((32, 32))
            codes[number:number + 9, :12], codes[30:] = top, 255
            save(tmp_path / f'{name}/images/{number}.png', np.zeros((32, 32, 3)))
            save(tmp_path / f'{name}/masks/{number}.png', codes)
    run = tu.train(data=str(tmp_path / 'set'), **{**TINY, 'num_epochs': 1}).run_dir
    for name, times in (('set', 0), ('other', 1)):
        caplog.clear()
        assert tu.main(['evaluate', str(run), f'data={tmp_path / name}']) == 0
        assert caplog.text.count('the masks are not coded as in training: 0 is background, 255 foreground; there: 0 is '
                                 'background, 1 foreground; 255 is ignored') == times


def test_masks_that_lack_a_class_or_void_are_coded_alike(tmp_path, caplog):
    for name, values in (('set', (0, 1, 2, 255)), ('other', (0, 1, 2)), ('third', (0, 1, 255))):
        coded_set(tmp_path / name, values, count=8)
    run = tu.train(data=str(tmp_path / 'set'), **{**TINY, 'num_epochs': 1}).run_dir
    for name in ('other', 'third'):
        assert tu.main(['evaluate', str(run), f'data={tmp_path / name}']) == 0
    assert 'not coded as in training' not in caplog.text


def test_noise_of_another_share_is_no_other_coding(own, two, capsys, caplog):
    with edited(own / 'best.pt') as saved:
        saved['coding'] = '0 and 255 with 1.17% of the pixels in between (JPEG noise or soft edges): above 127 is ' \
                          'foreground'
    noisy = shutil.copytree(two[1], own.parent / 'noisy')
    for path in (noisy / 'masks').iterdir():
        mask = np.array(PIL.Image.open(path)).astype(int)
        draw = np.random.default_rng(0).integers(0, 20, mask.shape)
        PIL.Image.fromarray(np.where(mask > 127, mask - draw, mask + draw).astype(np.uint8)).save(path)
    assert tu.main(['evaluate', str(own), f'data={noisy}', 'device=cpu']) == 0
    assert 'in between (JPEG noise' in capsys.readouterr().out and 'not coded as in training' not in caplog.text


def test_own_images_scored_as_other_data_are_said_to_be_trained_on(own, two, tmp_path, caplog, capsys):
    data = shutil.copytree(two[1], tmp_path / 'moved')
    assert tu.main(['evaluate', str(own), f'data={data}']) == 0
    share = tu.load(own).config['val_fraction']
    assert f'trained on most of them: type val_fraction={share} fold=0 too' in caplog.text
    caplog.clear()
    capsys.readouterr()
    assert tu.main(['evaluate', str(own), f'data={data}', f'val_fraction={share}']) == 0
    assert 'images of' in capsys.readouterr().out and 'trained on' not in caplog.text
    assert tu.main(['evaluate', str(own), f'data={draw_set(tmp_path / "other", count=8, seed=1)}']) == 0
    assert 'trained on' not in caplog.text


def test_own_images_of_a_fold_are_offered_that_fold(small_set, caplog):
    run = tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), fold=2).run_dir
    names = lambda rows: sorted(os.path.basename(row['file']) for row in rows)
    held_out = names(tu.evaluate(run)['images'])
    tu.evaluate(run, data=str(shutil.copytree(small_set, 'moved')))
    words = re.search('type (val_fraction=.*) too', caplog.text)[1].split()
    assert names(tu.evaluate(run, data='moved', **tu.parse_overrides(words)[0])['images']) == held_out


@pytest.mark.parametrize('source, copy, words', [
    ('train/000.png', 'val/copy.png', 'trained on too'), ('val/006.png', 'test/copy.png', 'validate too'),
    ('train/000.png', 'copy.png', 'in no split by name')])
def test_evaluate_says_nothing_of_what_other_data_would_train_on(own, tmp_path, capsys, source, copy, words):
    data = draw_set(tmp_path / 'other', count=8, seed=1)
    for path in sorted(data.glob('*/*.png')):
        target = path.parent / ('val' if path.stem > '005' else 'train') / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    for kind in ('images', 'masks'):
        (data / kind / copy).parent.mkdir(exist_ok=True)
        shutil.copy(data / kind / source, data / kind / copy)
    assert tu.main(['check', f'data={data}', *as_words(TINY)]) == 0
    assert words in capsys.readouterr().out
    assert tu.main(['evaluate', str(own), f'data={data}']) == 0
    said = capsys.readouterr().out
    assert ' val images of' in said and words not in said


def test_evaluate_offers_no_other_channels(own, tmp_path, capsys):
    data = draw_set(tmp_path / 'other', count=6, seed=1)
    for path in (data / 'images').iterdir():
        PIL.Image.open(path).convert('RGBA').save(path)
    tu.main(['check', f'data={data}', *as_words(TINY)])
    assert 'in_channels=4' in capsys.readouterr().out
    assert tu.main(['evaluate', str(own), f'data={data}']) == 0
    assert 'in_channels' not in capsys.readouterr().out


def test_the_line_for_the_test_images_has_what_was_typed(tmp_path, capsys):
    for split, count in {'train': 8, 'val': 4, 'test': 5}.items():
        drawn = draw_set(tmp_path / split, count, seed=count)
        for kind in ('images', 'masks'):
            (tmp_path / 'set' / kind).mkdir(parents=True, exist_ok=True)
            shutil.move(drawn / kind, tmp_path / 'set' / kind / split)
    run = tu.train(**TINY | {'num_epochs': 1}, data='set').run_dir
    (tmp_path / 'set/images').rename(tmp_path / 'set/pics')
    (tmp_path / 'set/masks').rename(tmp_path / 'set/drawn')
    assert tu.main(['evaluate', str(run), 'images=pics', 'masks=drawn', 'tta=True']) == 0
    _, _, *words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix('Next:  '))
    assert 'split=test' in words and 'tta=True' in words and tu.main(words) == 0
    assert '5 test images of' in capsys.readouterr().out


def test_images_of_another_fold_that_were_trained_on_are_told(small_set, caplog):
    """Cross-validation by list files: what one fold holds out the others were trained on."""
    for fold in (0, 1):
        lines = [f'images/{n:03d}.png,masks/{n:03d}.png,{"val" if n % 3 == fold else "train"}' for n in range(12)]
        (small_set / f'fold{fold}.csv').write_text('\n'.join(['image,mask,split', *lines]))
    run = tu.train(data=str(small_set / 'fold0.csv'), **{**TINY, 'num_epochs': 1}).run_dir
    assert tu.main(['evaluate', str(run), f'data={small_set / "fold1.csv"}']) == 0
    assert '4 of these 4 images were trained on' in caplog.text
    caplog.clear()
    assert tu.main(['evaluate', str(run), f'data={small_set / "fold0.csv"}']) == 0
    assert 'trained on' not in caplog.text


def test_other_data_whose_foreground_is_ignored_is_refused(three, two, capsys):
    assert tu.main(['evaluate', str(three[0]), f'data={two[1]}']) == 2
    told = capsys.readouterr().err
    assert 'all pixels are of one class or ignored' in told and 'say in mask_values which value is which class' in told


def test_other_data_of_more_classes_is_told_what_the_network_knows(two, three, capsys):
    assert tu.main(['evaluate', str(two[0]), f'data={three[1]}', 'device=cpu']) == 2
    told = capsys.readouterr().err
    assert 'the network knows 2 classes' in told and 'num_classes=' not in told


@pytest.mark.parametrize('codes', [4, 3])
def test_other_data_are_offered_no_table_of_classes_that_the_network_lacks(codes, two, small_set, capsys):
    """Codes 0, 80, 160 and 240 would be four classes, and 0, 80 and 160 three, with class names in a file."""
    (small_set / 'class_dict.csv').write_text('name,value\nground,0\ncell,80\nwall,160\n')
    for path in small_set.glob('masks/*'):
        rows = np.indices(np.array(PIL.Image.open(path)).shape)[0]
        PIL.Image.fromarray(np.uint8(80 * (rows // 4 % codes))).save(path)
    assert tu.main(['evaluate', str(two[0]), f'data={small_set}', 'device=cpu']) == 2
    told = capsys.readouterr().err
    tables = [ast.literal_eval(table) for table in re.findall('mask_values="({.*?})"', told)]
    assert 'the network knows 2 classes' in told and all(max(table.values()) < 2 for table in tables), told
    assert 'mask_values=nonzero' in told


@pytest.mark.parametrize('verb', ['evaluate', 'predict'])
def test_where_nothing_is_trained_the_advice_on_memory_is_of_no_training(two, verb, capsys, monkeypatch):
    def full(self, images):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(tu.SegmentationModel, 'forward', full)
    words = [str(two[1] / 'images'), '-o', 'out'] if verb == 'predict' else []
    assert tu.main([verb, str(two[0]), *words]) in (1, 2)
    told = ''.join(capsys.readouterr())
    assert 'type a smaller image_size, on a GPU device=cpu; in a training also' in told


def test_a_class_that_came_later_is_told_without_lines_that_a_run_would_refuse(small_set, capsys):
    """The masks of a run were 0 and 1; now some of them hold 2 and 3 too."""
    draw_set(small_set, values=(0, 1))
    run = tu.train(data=str(small_set), **{**TINY, 'num_epochs': 1}).run_dir
    for path in sorted(small_set.glob('masks/00*.png')):
        mask = np.array(PIL.Image.open(path))
        mask[:4, :4], mask[:4, 4:8] = 2, 3
        PIL.Image.fromarray(mask).save(path)
    for words in (['evaluate', str(run)], [f'resume={run}', 'num_epochs=2'],
                  ['check', f'resume={run}', 'num_epochs=2']):
        assert tu.main(words) == 2
        told = capsys.readouterr().err
        assert ' 3 (0.83%, 10 images)' in told and 'the network knows 2 classes' in told
        assert 'mask_values=' not in told and 'num_classes=' not in told and 'colon' not in told


def test_a_run_on_images_of_very_large_numbers_is_used_like_any_other(small_set):
    """Counts of 32 bits, say. Their mean was refused as beyond what one may type: the run could not be loaded."""
    for path in (small_set / 'images').iterdir():
        np.save(path.with_suffix('.npy'), np.float32(1e10) * np.array(PIL.Image.open(path)))
        path.unlink()
    run = tu.train(**{**TINY, 'num_epochs': 1}, data=str(small_set)).run_dir
    assert min(tu.load(run).config['mean']) > 1e11
    assert tu.main(['evaluate', str(run)]) == 0


# --- evaluate: the worst images -------------------------------------------------------


def test_of_images_with_equal_iou_those_with_more_wrong_pixels_are_worst(own, monkeypatch):
    """Nothing is found in any image, so IoU is 0 everywhere; the discs are of different sizes."""
    drawn = {}
    monkeypatch.setattr(tu, 'draw_samples', lambda *_, captions, **__: drawn.update(captions))
    with edited(own / 'best.pt') as saved:
        saved['weights']['network.segmentation_head.0.bias'].fill_(-1e4)
    tu.evaluate(own)
    rows = json.loads((own / 'metrics.json').read_text())['images']
    shares = [next(row['wrong_pixels'] for row in rows if row['index'] == index) for index in drawn]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) > 1


@pytest.mark.parametrize('tta', [False, True])
def test_the_worst_images_are_drawn_as_they_were_scored(own, two, monkeypatch, tta):
    rows = []
    monkeypatch.setattr(tu, 'sheet', lambda some, *_: rows.extend(some))
    content, model = tu.evaluate(own, tta=tta), tu.load(own)           # which stores its threshold
    worst, path = rows[0][1][2], next(row['file'] for row in content['images'] if rows[0][0].split()[0] in row['file'])
    drawn = {kind: tu.colour_mask(model.predict(path, tta=kind), 2) for kind in (False, True)}
    assert not np.array_equal(drawn[False], drawn[True])               # else this would show nothing
    assert np.array_equal(worst, drawn[tta])


def test_the_worst_images_of_a_set_below_home_are_named_from_its_folder(own, tmp_path, two, monkeypatch):
    """bash hands data=~/set over as it is. The whole path would push the score off the page."""
    monkeypatch.setenv('HOME', str(two[1].parent))
    rows = []
    monkeypatch.setattr(tu, 'sheet', lambda some, *_: rows.extend(some))
    tu.evaluate(own, data=f'~/{two[1].name}')
    assert rows and all(caption.startswith('images') for caption, _ in rows)


def test_single_pixels_stay_visible_on_a_sheet(tmp_path):
    """At a third of the size eight of these nine would fall between the pixels."""
    mask = np.zeros((672, 672), np.uint8)
    for row, column in np.ndindex(3, 3):
        mask[60 + 181 * row, 60 + 181 * column] = 1                    # 181 = 3 x 60 + 1
    pictures = [np.full((672, 672, 3), 99, np.uint8), tu.colour_mask(mask, 2)]
    page = np.array(tu.sheet([('x', pictures)], ['image', 'mask'], tmp_path / 'page.png'))[26:26 + 224]
    assert cv2.connectedComponents((page[1:-1, 237:459] == 255).all(-1).astype(np.uint8))[0] == 1 + 9
    larger = np.zeros((2000, 3000), np.uint8)
    larger[::199, ::199] = 1                                           # all stay apart on the page
    shown = (tu.keep_small_things(tu.colour_mask(larger, 2), 224)[7::14, 7::14] == 255).all(-1).astype(np.uint8)
    assert cv2.connectedComponents(shown)[0] == 1 + larger.sum()
    photograph = np.random.default_rng(0).integers(0, 255, (672, 672, 3), dtype=np.uint8)
    assert np.array_equal(tu.keep_small_things(photograph, 224), photograph)


def test_a_sheet_holds_one_picture_at_a_time(two, tmp_path):
    """Six scans of 36 megapixels would be 3 GB otherwise."""
    model, peaks = tu.load(two[0]), []
    config = {**model.config, 'data': str(draw_set(tmp_path / 'set', count=16, size=600))}
    held_out = tu.SegmentationDataset(tu.inspect_data(config), 'train', config, is_training=False)
    for count in (1, 2, 8):
        tracemalloc.start()
        tu.draw_samples(model, held_out, tmp_path / 'page.png', captions=dict.fromkeys(range(count), ''))
        peaks.append(tracemalloc.get_traced_memory()[1] / 600**2)
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1] and peaks[0] < 100                # bytes for each pixel of one picture


def test_images_that_are_mostly_wrong_come_before_empty_ones_with_a_few_false_pixels(own, two, tmp_path, monkeypatch):
    """Fourteen empty masks, whose IoU is 0 for the spot that is found, and one of nearly all but the disc."""
    y, x = np.mgrid[:64, :64]
    for number in range(15):
        disc = (y - 32) ** 2 + (x - 32) ** 2 < (18 if number == 7 else 8) ** 2
        picture = np.random.default_rng(number).integers(0, 90, (64, 64, 3)) + disc[..., None] * np.array([120, 80, 40])
        mask = 255 * (~disc | (x < 28)) * (number == 7)
        for kind, array in (('images', picture), ('masks', mask)):
            (tmp_path / 'set' / kind).mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(array.astype(np.uint8)).save(tmp_path / f'set/{kind}/{number:03}.png')
    drawn = {}
    monkeypatch.setattr(tu, 'draw_samples', lambda *_, captions, **__: drawn.update(captions))
    assert tu.main(['evaluate', str(own), f'data={tmp_path / "set"}', 'device=cpu', 'val_fraction=0']) == 0
    content, = (json.loads(path.read_text()) for path in own.glob('evaluation_*/metrics.json'))
    scores = [row['iou'] for row in content['images']]
    assert scores[:7] + scores[8:] == [0] * 14 and 0 < scores[7] < 0.5     # else this would show nothing
    assert next(iter(drawn)) == 7


def test_an_image_that_is_ignored_whole_comes_after_the_worst(three, tmp_path, monkeypatch):
    """It has no score. What the others are sorted by is told below each."""
    run = shutil.copytree(three[0], tmp_path / 'run')
    shutil.copytree(three[1], tmp_path / 'set')
    first = sorted((tmp_path / 'set/masks').iterdir())[0]
    PIL.Image.fromarray(np.full_like(np.array(PIL.Image.open(first)), 255)).save(first)
    drawn = {}
    monkeypatch.setattr(tu, 'draw_samples', lambda *_, captions, **__: drawn.update(captions))
    tu.evaluate(run, data=str(tmp_path / 'set'))
    path, = run.glob('evaluation_set*/metrics.json')
    rows = {row['index']: row for row in json.loads(path.read_text())['images']}
    *others, last = drawn
    assert rows[last]['file'].endswith(first.stem + '.png') and len(others) > 3
    agreement = [rows[index]['iou'] - rows[index]['wrong_pixels'] for index in others]
    assert agreement == sorted(agreement)
    assert all(drawn[index].endswith(f'{rows[index]["wrong_pixels"]:.1%} wrong') for index in others)


# --- pictures -------------------------------------------------------------------------


def test_classes_have_colours_of_their_own():
    colours = tu.colour_mask(np.arange(37), 37)
    assert len(np.unique(colours, axis=0)) == 37                       # background and 36 classes


def test_an_overlay_has_one_contrast_however_many_bands_it_comes_in(tmp_path):
    """A ramp of 16-bit values stays a ramp where two bands meet."""
    image = np.linspace(0.2, 0.4, 100, dtype=np.float32)[:, None, None].repeat(40, 1).repeat(3, 2)
    bands = torch.full((2, 1, 50, 40), -5.0)                           # background everywhere
    model = SimpleNamespace(config={'num_classes': 2}, threshold=0.5)
    tu.write_prediction(tmp_path / 'ramp.png', image, bands, model, 'overlay')
    column = np.array(PIL.Image.open(tmp_path / 'ramp.png'))[:, 0, 0].astype(int)
    assert column[0] < 5 and column[-1] > 250 and 0 <= np.diff(column).min() and np.diff(column).max() < 8


def test_a_sheet_tells_its_colours_and_holds_two_rows_side_by_side(tmp_path):
    rows = [(f'row {n}', [np.full((40, 60, 3), 255, np.uint8)] * 4) for n in range(12)]
    key = tu.colour_key({'num_classes': 3, 'class_names': ['ground', 'disc', 'corner']})
    page = np.asarray(tu.sheet(rows, ['image', 'truth', 'prediction', 'errors'], tmp_path / 'x.png', key))
    assert page.shape[1] / page.shape[0] > 1.2
    bottom = page[-26:].reshape(-1, 3)
    assert all((bottom == np.array(colour)).all(1).any() for colour, _ in key)
    assert [word for _, word in key] == ['ground', 'disc', 'corner', 'wrong', 'ignored']


def test_a_sheet_writes_letters_beyond_ascii(tmp_path):
    """Class names and file names; Pillow's own font draws the same empty box for each."""
    page = lambda word: tu.sheet([], ['image'] * 4, tmp_path / 'x.png', [((0, 0, 0), word)]).tobytes()
    assert len({page(word) for word in 'äößéж'}) == 5


def test_a_legend_tells_long_names_apart(tmp_path):
    """Cut at 14 letters, "degenerate_cell_large" and "degenerate_cell_small" were the same."""
    ends = ('large', 'small')
    page = [np.asarray(tu.sheet([], ['image'] * 4, tmp_path / 'x.png', [((0, 0, 0), f'degenerate_cell_{end}')]))
            for end in ends]
    assert (page[0] != page[1]).any()


@pytest.mark.parametrize('place', [None, '/nowhere'])
def test_a_sheet_is_drawn_without_matplotlib_or_its_fonts(tmp_path, monkeypatch, place):
    """check, and TensorBoard in mid-training, ended with what a broken matplotlib raises."""
    import matplotlib
    monkeypatch.setattr(matplotlib, 'get_data_path', lambda: place)
    if not place:
        monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert np.asarray(tu.sheet([], ['image'] * 4, tmp_path / 'x.png', [((0, 0, 0), 'word')])).min() == 0


def test_a_command_leaves_the_level_of_the_log_as_it_was(capsys):
    level = tu.log.level
    try:
        tu.log.setLevel('ERROR')
        assert tu.main(['predict', 'nowhere', 'nothing']) == 2 and tu.log.level == logging.ERROR
    finally:
        tu.log.setLevel(level)


def test_a_sheet_takes_an_image_that_is_nearly_a_line(tmp_path):
    """A line-scan camera's 3,000 x 4 pixels would have no height at the size of a sheet."""
    page = tu.sheet([('line', [np.full((4, 3000, 3), 90, np.uint8)] * 2)], ['image', 'truth'], tmp_path / 'x.png')
    assert (np.asarray(page) == 90).any()


def test_the_curves_of_a_run_are_a_picture(two, three):
    for run, _ in (two, three):
        with PIL.Image.open(run / 'curves.png') as picture:
            assert np.ptp(np.asarray(picture.convert('L'))) > 200 and picture.width > 1000 and picture.height > 300


def test_the_curves_of_one_epoch_have_no_fractions_of_it(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    ticks = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: ticks.extend(figure.axes[0].get_xticks()))
    tu.draw_curves([{'event': '', 'epoch': 1, 'train_loss': 0.5, 'val_loss': 0.4}], tmp_path / 'curves.png')
    assert ticks == [round(tick) for tick in ticks]


def test_a_confusion_matrix_of_many_classes_stays_a_picture(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    save = Figure.savefig                                              # at a tenth of its size: that takes seconds
    monkeypatch.setattr(Figure, 'savefig', lambda figure, file, dpi, **how: save(figure, file, dpi=dpi / 10, **how))
    tu.draw_confusion(torch.eye(64), [f'class {number}' for number in range(64)], tmp_path / 'many.png')
    assert 50 < max(PIL.Image.open(tmp_path / 'many.png').size) < 450


def test_samples_show_foreground_where_most_images_have_none():
    shows = np.zeros(100, bool)
    assert tu.chosen_samples(shows) == [0, 19, 39, 59, 79, 99]
    shows[[3, 4, 50, 51]] = True
    assert tu.chosen_samples(shows) == [0, 3, 4, 49, 51, 99]
    assert tu.chosen_samples(~shows) == [0, 19, 39, 59, 79, 99] and tu.chosen_samples(shows[3:5]) == [0, 1]


def test_what_was_learnt_and_lost_again_is_told(caplog):
    rows = [{'val_iou': 0.1}, {'val_iou': None, 'event': 'x'}, {'val_iou': 0.04}, {'val_iou': None, 'event': 'x'}]
    tu.warn_if_lost({'iou': 0.1, 'epoch': 1}, rows)
    assert 'the last epoch has IoU 0.0400: what was learnt by epoch 1 was lost again' in caplog.text
    caplog.clear()
    more = [*rows[:2], {'val_iou': 0.06}]
    for best, history in (({'iou': 0.1, 'epoch': 1}, more), ({'loss': 0.1}, [{'val_loss': 3}]), ({}, [])):
        tu.warn_if_lost(best, history)
    assert not caplog.text


def test_a_network_of_one_size_refuses_another_in_words(small_set, monkeypatch):
    class OfOneSize(torch.nn.Conv2d):
        def forward(self, images):
            assert images.shape[-1] == 64, "Input width doesn't match model (64)."
            return super().forward(images)

    monkeypatch.setattr(tu, 'build_network', lambda config: OfOneSize(3, 1, 1))
    run = tu.train(data=str(small_set), **{**TINY, 'image_size': 64, 'num_epochs': 1}).run_dir
    for command in (tu.evaluate, lambda run, **typed: tu.predict(run, str(small_set / 'images'), **typed)):
        with pytest.raises(tu.ConfigError, match='cannot take.*type another image_size, such as 64'):
            command(run, image_size=96)


@pytest.mark.parametrize('line, stays', [
    ('type mask_values="{0: 0, 80: 1, 160: 2}" class_names="[a,b,c]"', False), ('{3F25}/a.png: 7, 8, 9', True),
    ('type mask_values="{0: 0, 80: 1}"', True), ('a.png: 7, 9', True)])
def test_lines_for_classes_that_a_network_lacks_go_and_what_is_wrong_stays(line, stays):
    with pytest.raises(tu.DataError) as raised, tu.as_learnt(tu.CONFIG | {'num_classes': 2}, other=True):
        raise tu.DataError([line])
    assert (line in raised.value.problems) == stays


def test_a_threshold_on_a_drive_without_locks_is_not_stored_and_that_is_said(own, caplog, monkeypatch):
    model = tu.load(own)

    def refuse(lock, *how, **named):
        raise NotImplementedError('FileSystem does not appear to support flock')

    monkeypatch.setattr('filelock.FileLock.acquire', refuse)
    assert not tu.store_threshold(own, 0.7, model) and 'support flock, so the best threshold' in caplog.text


def test_thresholds_are_counted_in_one_pass(monkeypatch):
    """... with the counts of each threshold alone, also where a logit is on a threshold, infinite or NaN."""
    levels = sorted({0.37, *(i / 20 for i in range(1, 20))})
    logits = torch.randn(1, 60, 50, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 0, :20] = torch.tensor([math.log(level / (1 - level)) for level in levels])
    logits[0, 1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    truth = np.random.default_rng(0).choice(np.uint8([0, 1, 255]), (60, 50))
    expected = [tu.confusion_matrix(tu.classify(logits, level), torch.from_numpy(truth), 2) for level in levels]
    calls, real = [], tu.confusion_matrix
    monkeypatch.setattr(tu, 'confusion_matrix', lambda *what: calls.append(1) or real(*what))
    found = tu.count_at_levels([logits[:, :25], logits[:, 25:]], truth, levels, 2)
    assert torch.equal(found, torch.stack(expected)) and len(calls) == 2


def test_several_classes_have_one_matrix_for_all_thresholds():
    logits, truth = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(0)), np.full((9, 8), 2, np.uint8)
    found = tu.count_at_levels([logits[:, :5], logits[:, 5:]], truth, [0.4, 0.5], 3)
    assert torch.equal(found, torch.stack([tu.confusion_matrix(logits.argmax(0), torch.from_numpy(truth), 3)] * 2))


def test_reading_an_upright_image_copies_nothing(tmp_path, monkeypatch):
    PIL.Image.new('RGB', (8, 6)).save(tmp_path / 'a.jpg')
    monkeypatch.setattr(PIL.Image.Image, 'copy', lambda _: pytest.fail('a copy'))
    assert tu.read_image(tmp_path / 'a.jpg', tu.CONFIG).shape == (6, 8, 3)


def test_colours_are_counted_without_a_table_of_all(monkeypatch):
    """A table of 2 ** 24 counts took 30 ms for each small picture of a sheet."""
    monkeypatch.setattr(np, 'bincount', lambda *_, **__: pytest.fail('all colours'))
    assert tu.keep_small_things(np.full((300, 300, 3), 255, np.uint8), 224).min() == 255


def test_moved_data_are_split_by_the_groups_of_the_run(small_set, tmp_path):
    run = tu.train(**TINY, data=str(small_set), group_pattern='^0(.)').run_dir
    moved = small_set.rename(tmp_path / 'moved')
    images = tu.evaluate(run, data=str(moved), val_fraction=0.2)['images']
    assert sorted(Path(row['file']).name for row in images) == ['010.png', '011.png']


def test_tiles_are_predicted_whatever_default_device_a_notebook_has_set(two):
    """As the commands do; with 'cuda' the reach of the network was sought on two devices at once."""
    model = tu.load(two[0], settings={'size_policy': 'crop'})
    image = np.random.default_rng(0).integers(0, 256, (100, 130, 3), dtype=np.uint8)
    mask = model.predict(image)
    torch.set_default_device('meta')
    try:
        assert np.array_equal(mask, model.predict(image))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize('settings', [{'size_policy': 'crop'}, {'activation_checkpointing': True}], ids=str)
def test_a_model_is_built_alike_whatever_a_notebook_has_set(two, settings):
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert tu.load(two[0], settings=settings).least is None        # it was image_size; or a ConfigError
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_device_may_be_edited_in_config_for_the_commands_too(own, monkeypatch):
    monkeypatch.setitem(tu.CONFIG, 'device', 'cuda:15')
    with pytest.raises(tu.ConfigError, match="device='cuda:15': this machine has only"):
        tu.evaluate(own)
    assert tu.evaluate(own, device='cpu')['metrics']['iou'] > 0


def test_evaluate_keeps_no_matrix_of_each_image(three, tmp_path, monkeypatch):
    """Of 150 classes and 20,000 images they would take 4 GB."""
    made, real = [], tu.count_at_levels

    def counted(*what):
        assert sum(one() is not None for one in made) < 3
        found = real(*what)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(tu, 'count_at_levels', counted)
    tu.evaluate(shutil.copytree(three[0], tmp_path / 'own'), split='train')
    assert len(made) > 5


def test_the_reach_is_measured_on_pixels_like_those_of_training():
    seen = []
    tu.find_reach(lambda pixels: seen.append(pixels) or pixels, torch.zeros(1, 2, 1, 1), (96, 96),
                  {'mean': [10.0, -5.0], 'std': [1.0, 2.0]})
    assert seen[0].mean((0, 2, 3)).tolist() == pytest.approx([10, -5], abs=0.1)
    assert seen[0].amax((0, 2, 3)).tolist() == [11, -3]


def test_no_more_than_16_images_wait_at_their_own_size(two):
    drawn, model = [], tu.load(two[0], settings={'batch_size': 64})
    images = ((drawn.append(1), np.zeros((40, 40, 3), np.uint8)) for _ in range(40))
    next(tu.predict_stream(model, images))
    assert len(drawn) == 16


def test_what_is_kept_of_each_image_is_a_few_numbers(three, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(tu, 'report', lambda *what: kept.extend(what[5].values()))
    tu.evaluate(shutil.copytree(three[0], tmp_path / 'own'))
    assert kept and all(row.pop('counts').untyped_storage().nbytes() == 32 for row in kept)
    assert all(type(value) is float for row in kept for value in row.values())


# --- from a notebook ------------------------------------------------------------------


def torn_jpeg():
    """The bytes of half a JPEG."""
    content = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), np.uint8)).save(content, 'jpeg')
    return content.getvalue()[:len(content.getvalue()) // 2]


def test_a_torn_pil_image_is_a_data_error(two):
    with pytest.raises(tu.DataError, match='the image: cannot be read: image file is truncated'):
        tu.load(two[0]).predict(PIL.Image.open(io.BytesIO(torn_jpeg())))


def test_torn_images_are_refused_whatever_a_notebook_has_set(two, monkeypatch, tmp_path, capsys):
    """Every second answer in a forum sets it: what is lost was grey, without a word."""
    monkeypatch.setattr(PIL.ImageFile, 'LOAD_TRUNCATED_IMAGES', True)
    monkeypatch.setattr(PIL.Image, 'MAX_IMAGE_PIXELS', 10**7)
    (tmp_path / 'x.jpg').write_bytes(torn_jpeg())
    assert tu.predict(two[0], tmp_path / 'x.jpg', tmp_path / 'out') == 1
    assert 'image file is truncated' in capsys.readouterr().err
    with pytest.raises(tu.DataError, match='image file is truncated'):
        tu.load(two[0]).predict(tmp_path / 'x.jpg')
    assert PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True and PIL.Image.MAX_IMAGE_PIXELS == 10**7


def test_the_model_too_knows_the_home_folder(two, monkeypatch):
    monkeypatch.setenv('HOME', str(two[1]))
    model = tu.load(two[0])
    assert np.array_equal(model.predict('~/images/000.png'), model.predict(two[1] / 'images/000.png'))


@pytest.mark.parametrize('settings, told', [
    ({'nix': 1}, "unknown key 'nix'"), ({'batch_size': 0}, 'batch_size=0'),
    ({'size_policy': 'nix'}, "size_policy='nix'"), ({'threshold': 0.3}, "unknown key 'threshold'")])
def test_load_refuses_settings_that_are_none(two, settings, told):
    with pytest.raises(tu.ConfigError, match=told):
        tu.load(two[0], settings=settings)


def test_load_takes_settings_as_config_does(two):
    assert tu.load(two[0], settings={'image_size': 64}).predict(np.zeros((40, 40, 3), np.uint8)).shape == (40, 40)


def test_the_names_of_classes_are_drawn_in_the_fonts_that_are_set(tmp_path, monkeypatch):
    """A class named in Chinese was a box, though a font for it was set."""
    import matplotlib
    seen = []
    monkeypatch.setattr(tu, 'write_file', lambda path, write: seen.append(matplotlib.rcParams['font.family']))
    with matplotlib.rc_context({'font.family': ['STIXGeneral']}):
        tu.draw_confusion(torch.eye(2, dtype=torch.long), ['a', 'b'], tmp_path / 'x.png')
    assert seen == [['STIXGeneral']]


def test_the_curves_are_drawn_in_no_style_that_wants_latex(own):
    import matplotlib
    with matplotlib.rc_context({'text.usetex': True}):
        (own / 'curves.png').unlink(missing_ok=True)
        assert tu.evaluate(own)['metrics']
        assert matplotlib.rcParams['text.usetex']
    assert (own / 'confusion.png').stat().st_size > 1000 and (own / 'curves.png').exists()
