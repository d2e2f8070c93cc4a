"""Using a model: odd input, exports, processes, tune's advice.  python -m pytest tests/test_using_more.py"""
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import PIL.Image
import pytest
import tifffile
import torch
from torch import nn

import train_unet
from conftest import ROOT, TINY, WRITES_ONNX, draw_set
from test_processes import run_forked

pytestmark = pytest.mark.usefixtures('one_thread')
SMALL = TINY | {'encoder': 'tu-test_resnet', 'image_size': 64, 'num_epochs': 6, 'learning_rate': 0.01}


def draw_three(folder, count=12):
    """draw_set with a third class: a blue corner. The values are class ids."""
    draw_set(folder, count, values=(0, 1))
    for number in range(count):
        for kind, value in (('images', (0, 0, 255)), ('masks', 2)):
            path = folder / kind / f'{number:03d}.png'
            array = np.array(PIL.Image.open(path))
            array[:15, :15] = value
            PIL.Image.fromarray(array).save(path)
    return folder


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """A small run of two classes and its data: (run folder, data folder). Not to be changed."""
    folder = tmp_path_factory.mktemp('two')
    train_unet.train(**SMALL, data=str(draw_set(folder / 'set')), run_dir=str(folder / 'run'))
    return folder / 'run', folder / 'set'


@pytest.fixture(scope='module')
def three(tmp_path_factory):
    """A small run of three classes and its data; a module of the network is kept in float32."""
    folder = tmp_path_factory.mktemp('three')
    names = ['ground', 'disc', 'corner']
    data = draw_three(folder / 'set')
    train_unet.train(**SMALL, data=str(data), run_dir=str(folder / 'run'), class_names=names,
                     keep_float32='segmentation_head')
    return folder / 'run', folder / 'set'


@pytest.fixture
def own(two, tmp_path):
    """A copy of the run of two classes, for tests that write into it."""
    return shutil.copytree(two[0], tmp_path / 'own')


def written(folder):
    """The files below a folder, by their names in it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


# ---------------------------------------------------------------- predict: which files, which settings


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
    assert train_unet.predict(two[0], inputs, tmp_path / 'out') == 0
    assert written(tmp_path / 'out') == ['a/x.png', 'b/x.png']
    model = train_unet.load(two[0])
    for name in ('a/x.png', 'b/x.png'):
        mask = np.array(PIL.Image.open(tmp_path / 'out' / name)) // 255
        assert np.array_equal(mask, model.predict(namesakes / name))


def test_a_file_typed_by_name_is_tried_whatever_its_suffix(two, tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('no image')
    image = two[1] / 'images' / '001.png'
    shutil.copy(image, tmp_path / 'photo.upload')
    inputs = [str(tmp_path / 'notes.txt'), str(tmp_path / 'photo.upload'), str(image)]
    assert train_unet.predict(two[0], inputs, tmp_path / 'out') == 1
    said = capsys.readouterr().err
    assert 'notes.txt' in said and '1 files could not be predicted' in said
    assert written(tmp_path / 'out') == ['001.png', 'photo.png']


def test_a_folder_without_images_is_an_error(two, tmp_path):
    (tmp_path / 'empty').mkdir()
    image = str(two[1] / 'images' / '001.png')
    with pytest.raises(train_unet.UserError, match='empty: there is no such file, or no image in it'):
        train_unet.predict(two[0], [image, str(tmp_path / 'empty')], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    train_unet.predict(two[0], [image], tmp_path / 'out')
    with pytest.raises(train_unet.UserError, match='out: .* no image in it but masks of predict'):
        train_unet.predict(two[0], [str(tmp_path / 'out')], tmp_path / 'again')
    assert train_unet.predict(two[0], [str(tmp_path / 'out' / '001.png')], tmp_path / 'again') == 0


def test_image_size_may_be_one_number_for_predict_and_evaluate(two, own, tmp_path, capsys):
    typed = ['size_policy=crop', 'image_size=48']
    file = tmp_path / 'wide.png'
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(file)
    assert train_unet.main(['predict', str(own), str(file), '-o', str(tmp_path / 'out'), *typed]) == 0
    assert PIL.Image.open(tmp_path / 'out' / 'wide.png').size == (90, 70)
    assert train_unet.main(['evaluate', str(own), *typed]) == 0
    assert '2 val images' in capsys.readouterr().out


# ---------------------------------------------------------------- predict: depth, alpha, rotation


@pytest.mark.parametrize('shape', [(40, 40), (40, 40, 3)], ids=['grey', 'colour'])
def test_an_image_of_16_bits_is_not_predicted_as_black(two, tmp_path, capsys, shape):
    deep = np.random.default_rng(0).integers(0, 65535, shape, dtype=np.uint16)
    train_unet.cv2.imwrite(str(tmp_path / 'deep.png'), deep)
    assert train_unet.predict(two[0], [str(tmp_path / 'deep.png')], tmp_path / 'out') == 1
    assert 'deep.png: holds 16-bit or float pixels' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    model = train_unet.load(two[0])
    for image in (deep, deep / 65535.0, tmp_path / 'deep.png'):
        with pytest.raises(train_unet.DataError, match='16-bit or float pixels'):
            model.predict(image)


def test_alpha_rotation_and_tensors_do_not_change_the_mask(two):
    model = train_unet.load(two[0])
    array = np.array(PIL.Image.open(two[1] / 'images' / '003.png'))[:, :36]
    mask = model.predict(array)
    assert mask.shape == (40, 36) and 0 < mask.mean() < 1
    alpha = np.dstack([array, np.full((40, 36), 200, np.uint8)])
    turned = PIL.Image.fromarray(np.ascontiguousarray(np.rot90(array)))
    turned.getexif()[274] = 6                                          # a camera held upright
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in (array, alpha)]
    for image in (alpha, PIL.Image.fromarray(alpha), turned, *tensors):
        assert np.array_equal(model.predict(image), mask)


def test_probabilities_of_several_classes_are_bands_of_a_tiff(three, tmp_path):
    file = str(three[1] / 'images' / '003.png')
    assert train_unet.predict(three[0], [file], tmp_path, save='probability') == 0
    assert written(tmp_path) == ['003.tif']
    chances = tifffile.imread(tmp_path / '003.tif')
    assert chances.shape == (40, 40, 3) and chances.dtype == np.uint8
    assert np.abs(chances.sum(2, dtype=int) - 255).max() <= 2
    mask = train_unet.load(three[0]).predict(file)
    assert len(np.unique(mask)) > 1 and (chances.argmax(2) == mask).mean() > 0.95


# ---------------------------------------------------------------- evaluate


def test_evaluate_tunes_the_threshold_though_a_device_is_typed(own, capsys):
    (own / 'curves.png').unlink()
    train_unet.store_threshold(own, 1e-4, train_unet.load(own))                              # nearly all would be foreground
    assert train_unet.main(['evaluate', str(own), 'device=cpu']) == 0
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
    assert 'left out' in report['empty_masks'] and train_unet.load(own).threshold == report['threshold']
    assert {'curves.png', 'worst.png', 'confusion.png'} <= set(written(own))


def test_other_data_is_scored_whole_and_leaves_the_run_as_it_was(own, tmp_path, capsys):
    other = draw_set(tmp_path / 'other', count=8, seed=1)
    train_unet.store_threshold(own, 0.35, train_unet.load(own))
    (own / 'metrics.json').write_text('as it was')
    assert train_unet.main(['evaluate', str(own), f'data={other}']) == 0
    said = capsys.readouterr().out
    assert f'8 images of {other}' in said and 'threshold 0.35' in said
    assert 'no validation images' not in said and 'tuned on them' not in said
    assert train_unet.load(own).threshold == 0.35 and (own / 'metrics.json').read_text() == 'as it was'
    report = json.loads((own / 'evaluation_other' / 'metrics.json').read_text())
    assert len({row['file'] for row in report['images']}) == 8 and report['threshold'] == 0.35
    assert {'worst.png', 'confusion.png'} <= set(written(own / 'evaluation_other'))
    assert 'worst.png' not in written(own)


def test_own_images_scored_as_other_data_are_said_to_be_trained_on(own, two, tmp_path, caplog, capsys):
    data = shutil.copytree(two[1], tmp_path / 'moved')
    assert train_unet.main(['evaluate', str(own), f'data={data}']) == 0
    share = train_unet.load(own).config['val_fraction']
    assert f'trained on most of them: type val_fraction={share} too' in caplog.text
    caplog.clear()
    capsys.readouterr()
    assert train_unet.main(['evaluate', str(own), f'data={data}', f'val_fraction={share}']) == 0
    assert 'images of' in capsys.readouterr().out and 'trained on' not in caplog.text
    assert train_unet.main(['evaluate', str(own), f'data={draw_set(tmp_path / "other", count=8, seed=1)}']) == 0
    assert 'trained on' not in caplog.text


def test_predicting_with_a_model_in_train_mode_changes_nothing(two):
    """BatchNorm would take the statistics of the one image, and keep them."""
    model, image = train_unet.load(two[0]), np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    mask, before = model.predict(image), {key: value.clone() for key, value in model.state_dict().items()}
    assert np.array_equal(mask, model.train().predict(image))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# ---------------------------------------------------------------- export


@pytest.fixture
def pictures():
    """Batches of three with odd sides, as the three-class network takes them."""
    draw = torch.Generator().manual_seed(0)
    sizes = (51, 77), (64, 129)
    return [torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8, generator=draw) for size in sizes]


def assert_same_logits(run, other, images):
    """A model and its exported self, on batches of images."""
    model = train_unet.load(run, 'cpu')
    for batch in images:
        with torch.no_grad():
            torch.testing.assert_close(torch.as_tensor(other(batch)), model(batch), rtol=0, atol=1e-4)


def assert_facts(facts, classes):
    """What a program that loads the file must know."""
    assert 0 < float(facts['threshold']) < 1 and json.loads(facts['classes']) == classes
    assert facts['input'] == 'uint8, as stored' and json.loads(facts['image_size']) == [64, 64]


@pytest.fixture(scope='module')
def onnx_of_three(three, tmp_path_factory):
    """An ONNX file of the three-class run: writing one takes seconds."""
    folder = tmp_path_factory.mktemp('onnx')                           # in which it gets the usual name
    assert train_unet.main(['export', str(three[0]), 'format=onnx', '-o', str(folder)]) == 0
    return folder / 'model.onnx'


@WRITES_ONNX
def test_onnx_of_three_classes_agrees_and_says_what_it_needs(three, onnx_of_three, pictures):
    session = onnxruntime.InferenceSession(str(onnx_of_three), providers=['CPUExecutionProvider'])
    assert_same_logits(three[0], lambda batch: session.run(None, {'images': batch.numpy()})[0], pictures)
    facts = {entry.key: entry.value for entry in onnx.load(onnx_of_three).metadata_props}
    assert_facts(facts, ['ground', 'disc', 'corner'])


@WRITES_ONNX
def test_exports_of_16_bit_images_take_them_as_stored_in_every_size_although_the_network_pools(tmp_path, monkeypatch):
    data, run = draw_set(tmp_path / 'set'), tmp_path / 'run'
    for path in sorted((data / 'images').iterdir()):
        grey = np.asarray(PIL.Image.open(path).convert('L'))
        PIL.Image.fromarray(grey.astype(np.uint16) * 250).save(path)
    words = SMALL | {'architecture': 'PSPNet', 'num_epochs': 1}
    train_unet.train(**words, data=str(data), in_channels=1, run_dir=str(run))
    assert train_unet.export(run, 'onnx') == 0
    assert torch.nn.functional.adaptive_avg_pool2d is not train_unet.pool_by_product
    stored = torch.from_numpy(np.array(PIL.Image.open(path)))[None, None]
    assert stored.dtype == torch.uint16 and stored.shape == (1, 1, 40, 40)
    session = onnxruntime.InferenceSession(str(run / 'model.onnx'), providers=['CPUExecutionProvider'])
    facts = {entry.key: entry.value for entry in onnx.load(run / 'model.onnx').metadata_props}
    assert facts['input'] == 'uint16, as stored'
    model, odd = train_unet.load(run, 'cpu'), stored.repeat(3, 1, 3, 4)[..., :51, :129]
    for images in (stored, odd):
        with torch.no_grad():
            wanted = model(images.float() / 65535)
        written = session.run(None, {'images': images.numpy()})[0]
        torch.testing.assert_close(torch.as_tensor(written), wanted, rtol=0, atol=1e-4)
    image = stored[0, 0].numpy()
    assert model.predict(image).tolist() == model.predict(path).tolist()
    data.rename(tmp_path / 'gone')
    seen = []
    monkeypatch.setattr(train_unet, 'export_onnx', lambda model, *_: seen.append(model.config['image_dtype']) or model)
    train_unet.export(run, 'onnx')                                     # which writes nothing now
    assert seen == ['uint16']                                          # as the run has it, whatever is left to look at
    for other in (image.astype(np.int32), torch.tensor(image.astype(np.int64)), image.astype(np.float32)):
        with pytest.raises(train_unet.DataError, match='stored as uint16'):
            model.predict(other)
    np.save(tmp_path / 'wide.npy', image.astype(np.int32))
    assert train_unet.predict(run, [str(tmp_path / 'wide.npy')], tmp_path / 'out') == 1     # as in Python
    scene = np.where(np.arange(40) < 15, -9999, image / np.float32(65535)).astype(np.float32)
    assert model.predict(scene).shape == (40, 40)                      # a rim of no data is no other scale


@WRITES_ONNX
def test_exports_do_not_tell_where_the_program_lies(three, onnx_of_three, tmp_path):
    train_unet.export(three[0], 'pt2', tmp_path / 'model.pt2')
    with zipfile.ZipFile(tmp_path / 'model.pt2') as file:
        contents = [onnx_of_three.read_bytes(), *map(file.read, file.namelist())]
    for folder in {os.path.dirname(module.__file__) for module in (train_unet, torch, train_unet.smp)}:
        assert not any(os.fsencode(folder) in content for content in contents)


@WRITES_ONNX
def test_half_onnx_is_half_as_large_and_runs(two, tmp_path, capsys):
    typed = ['export', str(two[0]), 'format=onnx', 'half=True', '-o', str(tmp_path / 'm.onnx')]
    assert train_unet.main(typed) == 0
    assert 'on 2 validation images and 4 drawn ones' in capsys.readouterr().out
    weights = sum(4 * weight.numel() for weight in train_unet.load(two[0]).parameters())
    assert os.path.getsize(tmp_path / 'm.onnx') < 0.7 * weights
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / 'm.onnx').metadata_props}
    assert_facts(facts, ['background', 'foreground'])


def test_pt2_of_three_classes_agrees_and_says_what_it_needs(three, tmp_path, pictures, recwarn):
    assert train_unet.export(three[0], 'pt2', tmp_path / 'model.pt2') == 0
    assert 'No complete tensor' not in str([told.message for told in recwarn])
    facts = dict.fromkeys(['threshold', 'classes', 'input', 'image_size'], '')
    program = torch.export.load(tmp_path / 'model.pt2', extra_files=facts).module()
    assert_same_logits(three[0], program, pictures)
    assert_facts(facts, ['ground', 'disc', 'corner'])


def test_pt2_of_a_network_for_small_images_is_written_for_their_size(own, tmp_path, capsys):
    """torch.export wants sides above 32 pixels where they are free."""
    saved = train_unet.load_checkpoint(own / 'best.pt')
    saved['config']['image_size'] = [32, 32]
    train_unet.save_checkpoint(own / 'best.pt', saved)
    assert train_unet.export(own, 'pt2', tmp_path / 'm.pt2') == 0
    assert 'it takes images of 32 x 32 only' in capsys.readouterr().out
    program = torch.export.load(tmp_path / 'm.pt2').module()
    assert program(torch.zeros(3, 3, 32, 32, dtype=torch.uint8)).shape == (3, 1, 32, 32)


def test_pt2_has_no_half(two, tmp_path):
    with pytest.raises(train_unet.UserError, match='half=True'):
        train_unet.export(two[0], 'pt2', tmp_path / 'model.pt2', half=True)
    assert not (tmp_path / 'model.pt2').exists()


def test_half_smp_is_half_as_large_and_says_what_it_needs(three, tmp_path):
    sizes = []
    for half in (False, True):
        assert train_unet.export(three[0], 'smp', tmp_path / f'{half}', half) == 0
        sizes.append(sum(path.stat().st_size for path in (tmp_path / f'{half}').iterdir()))
        facts = json.loads((tmp_path / f'{half}' / 'preprocessing.json').read_text())
        assert_facts(facts, ['ground', 'disc', 'corner'])
    assert sizes[1] < 0.65 * sizes[0]


class OneSize(nn.Module):
    """As a DPT's encoder is: it takes images of 64 x 64 only."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        if images.shape[-2:] != (64, 64):
            raise ValueError('the height does not match')
        return self.network(images)


def test_a_network_that_takes_one_size_is_exported_for_that_size(small_set, tmp_path, capsys, monkeypatch):
    build = train_unet.build_network
    monkeypatch.setattr(train_unet, 'build_network', lambda config: OneSize(build(config)))
    run = train_unet.train(**SMALL | {'num_epochs': 1}, data=str(small_set)).run_dir
    assert train_unet.export(run, 'pt2', tmp_path / 'model.pt2') == 0
    said = capsys.readouterr().out
    assert 'and 1 drawn ones' in said and 'it takes images of 64 x 64 only: Unet cannot be written' in said
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    program = torch.export.load(tmp_path / 'model.pt2').module()
    with torch.no_grad():
        torch.testing.assert_close(program(images), train_unet.load(run)(images), atol=1e-4, rtol=0)


def test_an_export_is_not_asked_for_sizes_that_the_network_does_not_take(small_set, tmp_path):
    words = TINY | {'architecture': 'PAN', 'encoder': 'resnet18', 'image_size': 128, 'num_epochs': 1}
    run = train_unet.train(**words, data=str(small_set)).run_dir
    assert train_unet.export(run, 'smp', tmp_path / 'smp') == 0


def test_a_network_with_nan_is_not_exported(own, tmp_path):
    saved = train_unet.load_checkpoint(own / 'best.pt')
    name = next(name for name in saved['weights'] if name.endswith('segmentation_head.0.bias'))
    saved['weights'][name][0] = math.nan
    train_unet.save_checkpoint(own / 'best.pt', saved)
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'mine.txt').write_text('not yours')
    with pytest.raises(train_unet.UserError, match='does not agree.*nan'):
        train_unet.export(own, 'smp', tmp_path / 'out')
    left = {path.name for path in (tmp_path / 'out').iterdir()}
    assert 'mine.txt' in left and not left & {'config.json', 'model.safetensors', 'preprocessing.json'}


def test_an_export_that_fails_before_it_writes_removes_nothing(own, tmp_path, monkeypatch):
    (tmp_path / 'model.pt2').write_text('an older one')

    def fail(*_, **__):
        raise RuntimeError('no')

    monkeypatch.setattr(torch.export, 'export', fail)
    with pytest.raises(train_unet.UserError, match='cannot be written'):
        train_unet.export(own, 'pt2', tmp_path / 'model.pt2')
    assert (tmp_path / 'model.pt2').read_text() == 'an older one'


def test_an_export_whose_data_is_gone_says_that_it_was_checked_on_drawn_images_only(own, tmp_path, capsys):
    saved = train_unet.load_checkpoint(own / 'best.pt')
    saved['config']['data'] = str(tmp_path / 'moved away')
    train_unet.save_checkpoint(own / 'best.pt', saved)
    assert train_unet.export(own, 'smp', tmp_path / 'out') == 0
    said = capsys.readouterr().out
    assert 'checked on drawn images only' in said and 'on 0 validation images and 4 drawn ones' in said


# ---------------------------------------------------------------- precision of the best weights


class Noise(torch.utils.data.Dataset):
    """Eight float images with a map to learn."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return {'image': image, 'target': image.mean(0, keepdim=True)}


def test_best_weights_ask_for_the_precision_that_the_run_ended_with():
    """The first layer's output is above what float16 holds, the last one undoes it; float16 is given up."""
    model, calls = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1)), []

    def enlarge(module, inputs, output):
        calls.append(module.training)
        return output * 1e5 if module.training and sum(calls) > 5 else output

    model[0].register_forward_hook(enlarge)
    model[2].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] / 1e5,) if module.training and sum(calls) > 5 else None)
    result = train_unet.train(
        model=model,
        loss_fn=lambda net, batch: (net(batch['image']) - batch['target']).square().mean((1, 2, 3)),
        train_data=Noise(), val_data=Noise(), device='cpu', use_amp=True, amp_dtype='float16', init_scale=8.0,
        max_bad_steps=2, batch_size=4, num_epochs=6, learning_rate=0.01, optimizer='SGD', ema_decay=None,
        run_dir='run')
    rows = [row for row in result.history if not row['event']]
    assert rows[0]['precision'] == 'float16' != rows[-1]['precision'] and result.best['epoch'] == 6
    for name in ('best.pt', 'last.pt'):
        config = train_unet.load_checkpoint(f'run/{name}')['config']
        asked = {key: config[key] for key in ('use_amp', 'amp_dtype')}
        assert asked == train_unet.amp_settings(rows[-1]['precision'])


def test_the_settings_of_a_precision_ask_for_it():
    hardware = train_unet.Hardware('cpu', 'a CPU', units=frozenset({'float16', 'bfloat16'}))
    for dtype in ('float32', 'bfloat16', 'float16'):
        config = {**train_unet.CONFIG, **train_unet.amp_settings(dtype)}
        assert train_unet.resolve_precision(config, hardware).dtype == dtype


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_every_process_gets_as_many_pieces_of_a_window_and_no_image_is_lost(ranks):
    for batch_size in (1, 2, 3, 4, 8):
        config = {'seed': 0, 'batch_size': batch_size, 'accumulation_steps': 1}
        samplers = [train_unet.WindowSampler(100, config, rank, ranks) for rank in range(ranks)]
        for length in range(ranks, 50):
            pieces = [sampler.micro_batches(np.arange(length)) for sampler in samplers]
            assert len({len(own) for own in pieces}) == 1, (batch_size, length)
            lengths = Counter(len(piece) for own in pieces for piece in own)
            assert 0 not in lengths and max(lengths) <= batch_size + (ranks == 1 or batch_size == 1)
            assert ranks > 1 or 1 not in lengths or batch_size == 1 or length == 1
            assert sorted(np.concatenate([piece for own in pieces for piece in own])) == list(range(length))


IN_VALIDATION = '''
import os, sys
sys.path.insert(0, {root!r})
import torch, train_unet

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))

def loss_fn(model, batch):
    validates = not torch.is_grad_enabled() and os.path.exists('out/history.csv')   # from the second epoch on
    if os.environ['RANK'] == '1' and validates and not sent:
        sent.append(os.kill(os.getpid(), 15))
    return model(batch).square().mean((1, 2, 3))

sent = []
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 1, 3))
result = train_unet.train(model=net, loss_fn=loss_fn, train_data=Noise(), val_data=Noise(), num_epochs=1000,
                          batch_size=2, accumulation_steps=2, use_amp=False, device='cpu', run_dir='out')
print(f'process {{os.environ["RANK"]}} stopped by {{result.stopped_by}}, sent {{len(sent)}}')
'''


def test_a_signal_to_one_process_in_its_validation_stops_all(forks, tmp_path):
    """Process 1 gets SIGTERM while it validates; nobody waits for it in vain, and the epoch is saved."""
    (tmp_path / 'script.py').write_text(IN_VALIDATION.format(root=str(ROOT)))
    run_forked(2, 'script.py')
    for rank in (0, 1):
        assert f'process {rank} stopped by 15, sent {rank}' in (tmp_path / f'printed{rank}.txt').read_text()
    last, path = train_unet.load_last('out')
    assert path.name == 'last.pt' and 1 <= last['epoch'] < 1000


# ---------------------------------------------------------------- tune


def test_tune_refuses_a_gradient_that_points_elsewhere():
    gradients = {'bfloat16': (0.5, 1.0), 'float16': (0.99, 1.0)}
    numbers = {'peak': 1.0, 'layer': 'a', 'lost': 0.0, 'gradients': gradients}
    assert 'cosine of 0.500' in train_unet.judge('bfloat16', numbers)
    assert train_unet.judge('float16', numbers) == train_unet.judge('float32', numbers) == ''
    assert train_unet.judge('bfloat16', numbers | {'gradients': {'bfloat16': (math.nan, math.nan)}})


def test_the_line_that_tune_prints_can_be_typed(capsys):
    """A value with a space is quoted; what the preset file settles is not repeated, under no name."""
    best = train_unet.Candidate('float32', 'high', True, None, seconds=[1.0])
    hardware = SimpleNamespace(name='a CPU', kind='cpu', memory=2**30)
    typed = {'data': 'my set', 'num_epochs': 3, 'lr': 0.01, 'use_amp': True, 'amp_dtype': 'float16',
             'compile': True, 'tf32_matmul_precision': 'highest', 'channels_last': False,
             'decoder_channels': [16, 12, 8, 8, 8]}
    train_unet.write_winner(best, hardware, 2, {'loss': 'dice', 'use_amp': True}, typed)
    line = re.search('use it with:  python train_unet.py (.*)', capsys.readouterr().out)[1]
    command = train_unet.parse_command(shlex.split(line))
    assert command.overrides == {'learning_rate': 0.01} | {key: typed[key] for key in ('data', 'num_epochs',
                                                                                     'decoder_channels')}
    preset = train_unet.load_preset(command.preset)
    assert preset == {'loss': 'dice', 'use_amp': False, 'amp_dtype': 'auto', 'tf32_matmul_precision': 'high',
                      'channels_last': True, 'compile_model': False}


# --- found by reading the issue against the code --------------------------------------


def test_predict_never_writes_over_the_images(two, tmp_path, monkeypatch, capsys):
    """photo.png and -o . would be the same file."""
    monkeypatch.chdir(tmp_path)
    PIL.Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save('photo.png')
    before = Path('photo.png').read_bytes()
    assert train_unet.main(['predict', str(two[0]), 'photo.png', '-o', '.']) == 2
    assert 'would be overwritten' in capsys.readouterr().err and Path('photo.png').read_bytes() == before
    assert train_unet.main(['predict', str(two[0]), 'photo.png', '-o', 'photo.png']) == 2
    assert 'name a folder' in capsys.readouterr().err
    assert train_unet.main(['predict', str(two[0]), 'photo.png', '-o', 'out/one.png']) == 2 and not Path('out').exists()


def test_masks_of_an_earlier_time_are_no_images(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PIL.Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save('photo.jpg')
    for _ in range(2):
        assert train_unet.main(['predict', str(two[0]), '.', '-o', 'masks']) == 0
    assert [path.name for path in Path('masks').rglob('*.*')] == ['photo.png']


@pytest.mark.parametrize('units, dtype', [(set(), 'float32'), ({'bfloat16'}, 'bfloat16')])
def test_what_a_gpu_decided_is_not_obeyed_without_its_units(two, tmp_path, monkeypatch, units, dtype):
    """A run in 16 bits predicts in float32 on a laptop that would need ten times the time."""
    path = tmp_path / 'best.pt'
    saved = train_unet.load_checkpoint(two[0] / 'best.pt')
    saved['config'] |= {'use_amp': True, 'amp_dtype': 'bfloat16'}
    train_unet.save_checkpoint(path, saved)
    monkeypatch.setattr(train_unet, 'cpu_units', lambda: frozenset(units))
    model = train_unet.load(path, 'cpu')
    assert train_unet.resolve_precision(model.config, train_unet.detect_hardware(torch.device('cpu'))).dtype == dtype


def test_colours_are_greyed_alike_as_arrays_and_as_pictures(tmp_path):
    """in_channels=1: the weights are those of Pillow, the type stays."""
    colours = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    config = {**train_unet.CONFIG, 'in_channels': 1, 'image_dtype': 'uint8'}
    as_array, as_picture = (train_unet.as_image(image, config) for image in (colours, PIL.Image.fromarray(colours)))
    assert as_array.dtype == np.uint8
    assert np.abs(as_array[..., 0].astype(int) - as_picture.reshape(16, 16)).max() <= 1


def test_shallow_images_of_a_deep_set_are_resized_as_evaluate_does():
    """First the type, then the size: else predict would round where evaluate does not."""
    config = {**train_unet.CONFIG, 'image_dtype': 'float32', 'image_size': [8, 8], 'batch_size': 2, 'use_amp': False}
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
    list(train_unet.predict_stream(Watching(), [('x', train_unet.as_image(image, config))]))
    wanted = train_unet.resize(image.astype(np.float32) / 255, 8, 8)
    assert torch.equal(seen[0][0], torch.from_numpy(wanted).permute(2, 0, 1))


def test_a_folder_that_cannot_be_written_is_one_line(two, tmp_path, capsys):
    (tmp_path / 'taken').write_text('x')
    assert train_unet.main(['export', str(two[0]), '-o', str(tmp_path / 'taken' / 'model.onnx')]) == 2
    assert 'taken' in capsys.readouterr().err


def test_what_belongs_to_the_network_cannot_be_typed_for_its_use(two, capsys):
    """More classes than it was trained for would only give zeros."""
    assert train_unet.main(['evaluate', str(two[0]), f'data={two[1]}', 'num_classes=4']) == 2
    assert 'num_classes: belongs to the trained network' in capsys.readouterr().err


# ---------------------------------------------------------------- what an audit by running found


def save_images(folder, *names):
    """Small images under these names -> the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        array = np.random.default_rng(number).integers(0, 255, (40 + number, 50, 3), dtype=np.uint8)
        PIL.Image.fromarray(array).save(folder / name)
    return folder


def test_no_mask_takes_the_place_of_another(two, tmp_path):
    folder = save_images(tmp_path / 'p', 'a.png', 'a.jpg', 'a.jpg.png', 'a.jpg.png.png')
    assert train_unet.predict(two[0], [str(folder)], tmp_path / 'out') == 0
    assert len(written(tmp_path / 'out')) == 4
    sizes = {PIL.Image.open(tmp_path / 'out' / name).size for name in written(tmp_path / 'out')}
    assert sizes == {(50, 40), (50, 41), (50, 42), (50, 43)}


def test_names_that_differ_in_cases_alone_are_kept_apart(two, tmp_path):
    """Many disks take A.png and a.png for one file."""
    folder = save_images(tmp_path / 'p', 'A.jpg', 'a.png')
    assert train_unet.predict(two[0], [str(folder)], tmp_path / 'out') == 0
    assert len({name.casefold() for name in written(tmp_path / 'out')}) == 2


def test_one_file_in_two_spellings_is_one_file(two, tmp_path, monkeypatch):
    save_images(tmp_path / 'p', 'a.jpg')
    monkeypatch.chdir(tmp_path)
    assert train_unet.predict(two[0], ['p/a.jpg', './p/a.jpg'], 'out') == 0
    assert written(tmp_path / 'out') == ['a.png']


def test_the_home_folder_may_be_typed_as_a_tilde_for_predict_and_export(two, tmp_path, monkeypatch):
    """A shell expands it after a space, but not in --out=~/masks: that made a folder of this name."""
    save_images(tmp_path / 'p', 'a.jpg')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert train_unet.main(['predict', str(two[0]), '~/p', '--out=~/masks']) == 0
    assert train_unet.main(['export', str(two[0]), 'format=smp', '--out=~/smp']) == 0
    assert (tmp_path / 'masks/a.png').exists() and (tmp_path / 'smp/config.json').exists()


def test_photographs_in_the_folder_of_the_masks_stay(two, tmp_path):
    """An image that is no input; one in a folder inside the inputs, which is no mask of an earlier time."""
    beside = save_images(tmp_path / 'q', 'a.png', 'a.jpg')
    inside = save_images(tmp_path / 'r', 'a.jpg')
    save_images(inside / 's', 'a.png')
    for inputs, output in (([beside / 'a.jpg'], beside), ([inside], inside / 's')):
        before = (output / 'a.png').read_bytes()
        with pytest.raises(train_unet.UserError, match='would be overwritten'):
            train_unet.predict(two[0], list(map(str, inputs)), output)
        assert (output / 'a.png').read_bytes() == before


@pytest.mark.parametrize('save', ['mask', 'palette', 'overlay', 'probability'])
def test_masks_of_an_earlier_time_are_written_anew(two, tmp_path, save):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    for _ in range(2):
        assert train_unet.predict(two[0], [str(folder)], folder / 'masks', save=save) == 0
    assert written(folder) == ['a.jpg', 'masks/a.png']


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='Windows has no pipes with a name')
def test_a_pipe_among_the_images_is_not_waited_for(two, tmp_path):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    os.mkfifo(folder / 'log')
    rescue = threading.Timer(4, lambda: open(folder / 'log', 'wb').close())    # else who waits would wait for ever
    rescue.start()
    assert train_unet.predict(two[0], [str(folder)], tmp_path / 'out') == 0 and not rescue.finished.is_set()
    rescue.cancel()


def test_a_tiff_of_an_earlier_time_is_written_anew(three, tmp_path):
    folder = save_images(tmp_path / 'p', 'a.jpg')
    for _ in range(2):
        assert train_unet.predict(three[0], [str(folder)], folder / 'masks', save='probability') == 0
    assert written(folder) == ['a.jpg', 'masks/a.tif']


def test_a_mask_that_cannot_be_written_costs_no_other(two, tmp_path, capsys):
    folder = save_images(tmp_path / 'p', 'a.png', 'x' * 250 + '.png', 'z.png')
    (tmp_path / 'out' / 'a.png').mkdir(parents=True)
    assert train_unet.predict(two[0], [str(folder)], tmp_path / 'out') == 1
    assert written(tmp_path / 'out') == ['x' * 250 + '.png', 'z.png']
    assert 'a.png: cannot be written' in capsys.readouterr().err


def test_other_data_whose_foreground_is_ignored_is_refused(three, two, capsys):
    assert train_unet.main(['evaluate', str(three[0]), f'data={two[1]}']) == 2
    assert 'all pixels are of one class or ignored' in capsys.readouterr().err


def test_other_data_that_has_only_a_val_folder_is_scored(own, tmp_path, capsys):
    for kind in ('images', 'masks'):
        (tmp_path / 'set').mkdir(exist_ok=True)
        shutil.move(draw_set(tmp_path / f'drawn_{kind}') / kind, tmp_path / 'set' / kind / 'val')
    assert train_unet.main(['evaluate', str(own), f'data={tmp_path / "set"}']) == 0
    assert f'12 val images of {tmp_path / "set"}' in capsys.readouterr().out


def test_how_other_data_was_understood_is_told(own, tmp_path, capsys):
    assert train_unet.main(['evaluate', str(own), f'data={draw_set(tmp_path / "new", values=(0, 1))}']) == 0
    assert '0 is background, 1 foreground' in capsys.readouterr().out


def test_a_class_that_is_never_predicted_has_no_precision():
    counts = torch.tensor([[5, 0, 0], [2, 0, 0], [0, 0, 0]])
    metrics = train_unet.compute_metrics(counts)
    assert metrics['precision_per_class'][:2] == [5 / 7, 0] and math.isnan(metrics['precision_per_class'][2])
    assert metrics['mean_precision'] == pytest.approx(5 / 14) and metrics['mean_recall'] == 0.5


def test_of_images_with_equal_iou_those_with_more_wrong_pixels_are_worst(own, monkeypatch):
    """Nothing is found in any image, so IoU is 0 everywhere; the discs are of different sizes."""
    drawn = {}
    monkeypatch.setattr(train_unet, 'draw_samples', lambda *_, captions, **__: drawn.update(captions))
    saved = train_unet.load_checkpoint(own / 'best.pt')
    name = next(key for key in saved['weights'] if key.endswith('segmentation_head.0.bias'))
    saved['weights'][name] = torch.full_like(saved['weights'][name], -1e4)
    train_unet.save_checkpoint(own / 'best.pt', saved)
    assert train_unet.evaluate_run(own, {}) == 0
    rows = json.loads((own / 'metrics.json').read_text())['images']
    shares = [next(row['wrong_pixels'] for row in rows if row['index'] == index) for index in drawn]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) > 1


def test_an_image_that_is_ignored_whole_comes_after_the_worst(three, tmp_path, monkeypatch):
    """It has no score. What the others are sorted by is told below each."""
    run = shutil.copytree(three[0], tmp_path / 'run')
    shutil.copytree(three[1], tmp_path / 'set')
    first = sorted((tmp_path / 'set/masks').iterdir())[0]
    PIL.Image.fromarray(np.full_like(np.array(PIL.Image.open(first)), 255)).save(first)
    drawn = {}
    monkeypatch.setattr(train_unet, 'draw_samples', lambda *_, captions, **__: drawn.update(captions))
    assert train_unet.evaluate_run(run, {'data': str(tmp_path / 'set')}) == 0
    path, = run.glob('evaluation_set*/metrics.json')
    rows = {row['index']: row for row in json.loads(path.read_text())['images']}
    *others, last = drawn
    assert rows[last]['file'].endswith(first.stem + '.png') and len(others) > 3
    agreement = [rows[index]['iou'] - rows[index]['wrong_pixels'] for index in others]
    assert agreement == sorted(agreement)
    assert all(drawn[index].endswith(f'{rows[index]["wrong_pixels"]:.1%} wrong') for index in others)


@pytest.mark.parametrize('wider', [np.int64, np.int32, np.int16])
def test_whole_numbers_up_to_255_are_an_8_bit_image(two, wider):
    model = train_unet.load(two[0])
    image = np.array(PIL.Image.open(two[1] / 'images' / '001.png'))
    assert np.array_equal(model.predict(image.astype(wider)), model.predict(image))


@pytest.mark.parametrize('image', [255 * torch.rand(3, 8, 8).bfloat16(), np.zeros((0, 5, 3), np.uint8)],
                         ids=['bf16', 'empty'])
def test_what_is_no_image_for_this_network_is_told_in_words(two, image):
    with pytest.raises(train_unet.DataError):
        train_unet.load(two[0]).predict(image)


def test_a_pattern_with_an_equals_sign_is_a_path(two, tmp_path, monkeypatch):
    save_images(tmp_path / 'run=3', 'a.png')
    monkeypatch.chdir(tmp_path)
    assert train_unet.main(['predict', str(two[0]), 'run=3/*.png', '-o', 'out']) == 0
    assert written(tmp_path / 'out') == ['a.png']


def test_the_next_line_names_the_script_as_it_was_called(two, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['../there/train_unet.py'])
    train_unet.predict(two[0], [str(two[1] / 'images' / '001.png')], tmp_path / 'out')
    assert 'Next:  python ../there/train_unet.py export' in capsys.readouterr().out


def test_a_sheet_tells_its_colours_and_holds_two_rows_side_by_side(tmp_path):
    rows = [(f'row {n}', [np.full((40, 60, 3), 255, np.uint8)] * 4) for n in range(12)]
    key = train_unet.colour_key({'num_classes': 3, 'class_names': ['ground', 'disc', 'corner']})
    page = np.asarray(train_unet.sheet(rows, ['image', 'truth', 'prediction', 'errors'], tmp_path / 'x.png', key))
    assert page.shape[1] / page.shape[0] > 1.2
    bottom = page[-26:].reshape(-1, 3)
    assert all((bottom == np.array(colour)).all(1).any() for colour, _ in key)
    assert [word for _, word in key] == ['ground', 'disc', 'corner', 'wrong', 'ignored']


def test_what_half_export_says_is_the_difference_to_the_trained_network(three, tmp_path, capsys):
    """Not to the weights that were rounded already."""
    train_unet.export(three[0], 'smp', tmp_path / 'out', half=True)
    said = float(re.search(r'difference of a logit is ([\d.e+-]+)', capsys.readouterr().out)[1])
    again = train_unet.smp.from_pretrained(tmp_path / 'out').float().eval()
    model, worst = train_unet.load(three[0], 'cpu'), 0.0
    with torch.no_grad():
        for images in train_unet.example_images(model.config):
            real = (model(images) - again((images.float() - model.mean) / model.std)).abs().max()
            worst = max(worst, float(real))
    assert 1.01 * said >= worst > 1e-5                                 # three digits are said


def test_half_export_of_statistics_that_float16_cannot_hold_is_refused(own, tmp_path):
    saved = train_unet.load_checkpoint(own / 'best.pt')
    name = next(key for key in saved['weights'] if key.endswith('running_var'))
    saved['weights'][name] = saved['weights'][name] * 1e9
    saved['weights'][name.replace('running_var', 'weight')] *= 1e9 ** 0.5
    train_unet.save_checkpoint(own / 'best.pt', saved)
    with pytest.raises(train_unet.UserError, match='does not agree|does not run'):
        train_unet.export(own, 'smp', tmp_path / 'out', half=True)


def test_a_refused_export_leaves_no_folder(own, tmp_path):
    with pytest.raises(train_unet.UserError, match='ends in .pt2'):
        train_unet.export(own, 'pt2', tmp_path / 'new' / 'deep' / 'm.onnx')
    assert not (tmp_path / 'new').exists()


def test_a_large_tiff_of_one_bit_is_an_8_bit_image(two, tmp_path, monkeypatch):
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 100)
    tifffile.imwrite(tmp_path / 'x.tif', np.random.default_rng(0).random((64, 64)) > 0.5, photometric='minisblack')
    assert train_unet.predict(two[0], [str(tmp_path / 'x.tif')], tmp_path / 'out') == 0


def test_a_broken_validation_file_is_left_out_of_evaluate_with_skip_broken(own, two, tmp_path, caplog):
    data = shutil.copytree(two[1], tmp_path / 'data')
    config = train_unet.load(own).config | {'data': str(data)}
    pairs = train_unet.inspect_data(config).pairs
    path = Path(os.fsdecode(pairs.images[pairs.rows('val')[0]]))
    path.write_bytes(path.read_bytes()[:-200])                         # its header is whole
    assert train_unet.main(['evaluate', str(own), f'data={data}', 'skip_broken=True']) == 0
    assert f'left out: {path}' in caplog.text
    assert len(json.loads((own / 'evaluation_data' / 'metrics.json').read_text())['images']) == 11


# ---------------------------------------------------------------- what an audit found


def test_a_result_predicts_in_the_precision_that_healing_arrived_at(two, tmp_path):
    result = train_unet.train(**{**SMALL, 'num_epochs': 1, 'use_amp': True, 'amp_dtype': 'float16', 'std': 1e-6,
                                 'mean': 0.0, 'max_bad_steps': 1}, data=str(two[1]), run_dir=str(tmp_path / 'run'))
    image = two[1] / 'images' / '001.png'
    assert result.model.config['amp_dtype'] != 'float16'
    assert np.array_equal(result.model.predict(image), train_unet.load(tmp_path / 'run').predict(image))


@pytest.mark.parametrize('word', ['seed=5', 'val_fraction=0', 'group_pattern=^.'])
def test_evaluate_draws_no_other_validation_images(own, word, capsys):
    assert train_unet.main(['evaluate', str(own), word]) == 2
    assert 'would draw other validation images' in capsys.readouterr().err


def test_images_that_came_later_do_not_move_the_threshold(two, own, capsys):
    data = shutil.copytree(two[1], own.parent / 'grown')
    for kind in ('images', 'masks'):
        shutil.copy(data / kind / '001.png', data / kind / 'zz.png')
    content = train_unet.load_checkpoint(own / 'best.pt')
    content['config']['data'] = str(data)
    train_unet.save_checkpoint(own / 'best.pt', content | {'threshold': 0.85})
    assert train_unet.main(['evaluate', str(own)]) == 0
    assert 'not those this run began with' in capsys.readouterr().out
    assert train_unet.load(own).threshold == 0.85


def test_a_threshold_is_not_tuned_at_another_size(own):
    train_unet.store_threshold(own, 0.85, train_unet.load(own))
    assert train_unet.main(['evaluate', str(own), 'image_size=96']) == 0
    assert train_unet.load(own).threshold == 0.85


def test_other_data_is_scored_at_the_stored_threshold(own, tmp_path, capsys):
    train_unet.store_threshold(own, 0.9, train_unet.load(own))
    other = draw_set(tmp_path / 'cells.v1', count=4, seed=3)
    assert train_unet.main(['evaluate', str(own), f'data={other}']) == 0
    report = json.loads((own / 'evaluation_cells.v1' / 'metrics.json').read_text())
    assert report['metrics'] == report['metrics_at_threshold'] and report['threshold'] == 0.9
    assert f'IoU {report["metrics"]["iou"]:.4f}, Dice' in capsys.readouterr().out


def test_scores_of_another_set_of_the_same_name_go_elsewhere(own, tmp_path):
    for place in ('a', 'b'):
        assert train_unet.main(['evaluate', str(own), f'data={draw_set(tmp_path / place / "cells", 4)}']) == 0
    assert train_unet.main(['evaluate', str(own), f'data={tmp_path / "a" / "cells"}']) == 0
    assert {'evaluation_cells/metrics.json', 'evaluation_cells-2/metrics.json'} <= set(written(own))
    assert not (own / 'evaluation_cells-3').exists()


def test_validation_without_foreground_tunes_nothing(own, two, tmp_path):
    data = shutil.copytree(two[1], tmp_path / 'empty')
    content = train_unet.load_checkpoint(own / 'best.pt')
    content['config']['data'] = str(data)
    train_unet.save_checkpoint(own / 'best.pt', content | {'threshold': 0.8})
    pairs = train_unet.find_pairs(content['config'])
    for path in pairs.masks[pairs.rows('val')]:
        PIL.Image.fromarray(np.zeros((40, 40), np.uint8)).save(os.fsdecode(path))
    assert train_unet.main(['evaluate', str(own)]) == 0
    assert train_unet.load(own).threshold == 0.8


@pytest.mark.parametrize('word', ['image_dtype=float32', 'mean=1.0', 'std=2.0'])
def test_what_belongs_to_the_network_cannot_be_changed(own, two, word, capsys):
    assert train_unet.main(['predict', str(own), str(two[1] / 'images'), word]) == 2
    assert 'belongs to the trained network' in capsys.readouterr().err


def test_paths_may_be_path_objects(own, two, tmp_path):
    assert train_unet.predict(own, [two[1] / 'images' / '001.png'], tmp_path / 'o') == 0
    assert written(tmp_path / 'o') == ['001.png']


def test_masks_go_where_out_says(own, two, tmp_path):
    assert train_unet.main(['predict', str(own), str(two[1] / 'images' / '001.png'), '--out', str(tmp_path / 'o')]) == 0
    assert written(tmp_path / 'o') == ['001.png']


def test_the_demo_set_is_other_data_too(own, capsys):
    train_unet.write_demo(train_unet.DEMO_FOLDER, num_train=3, num_val=3)
    assert train_unet.main(['evaluate', str(own), 'data=demo']) == 0
    assert re.search('^3 val images of ', capsys.readouterr().out, re.MULTILINE)        # not drawn again


def test_a_resumed_run_keeps_its_tuned_threshold(own, two):
    train_unet.store_threshold(own, 0.7, train_unet.load(own))
    assert train_unet.train(resume=str(own)).model.threshold == 0.7


# --- a network of one's own on images from a folder ---

OWN_RUN = {'num_epochs': 2, 'image_size': 64, 'augment': 'none', 'num_workers': 0, 'val_fraction': 0.2,
           'run_dir': 'own', 'ema_decay': None, 'learning_rate': 0.01}


def own_network(in_channels=3, classes=1):
    return nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, classes, 3, padding=1))


def test_a_network_of_ones_own_trains_on_a_folder_and_is_loaded_again(small_set):
    """It sees normalised float32 images, as the network of the config does; the same weights give the same mask."""
    seen, network = [], own_network()
    before = [p.clone() for p in network.parameters()]
    network.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, inputs[0].max().item())))
    result = train_unet.train(model=network, data=str(small_set), **OWN_RUN)
    assert {dtype for dtype, _ in seen} == {torch.float32} and max(most for _, most in seen) < 10
    assert 'encoder' not in Path('own/log.txt').read_text()
    assert not any(torch.equal(old, new) for old, new in zip(before, network.parameters()))
    image = sorted((small_set / 'images').iterdir())[0]
    again = train_unet.load('own', model=own_network())
    assert (again.predict(image) == result.model.predict(image)).all()
    with pytest.raises(train_unet.UserError, match="load.'own/best.pt', model=NETWORK"):
        train_unet.load('own')
    with pytest.raises(train_unet.UserError, match='resumed from Python, by model=NETWORK'):
        train_unet.train(resume='own', num_epochs=3)
    more = train_unet.train(model=own_network(), resume='own', num_epochs=3)
    assert [row['epoch'] for row in more.history if not row['event']] == [1, 2, 3]


@pytest.mark.parametrize('network, words', [
    (own_network(classes=2), r'gives \(1, 2, 64, 64\).*2 classes want logits \(1, 1, 64, 64\), one channel'),
    (own_network(in_channels=1), r'cannot take normalised float32 images \(1, 3, 64, 64\)'),
])
def test_a_network_of_ones_own_that_does_not_fit_the_data_is_refused_in_words(small_set, network, words):
    with pytest.raises(train_unet.ConfigError, match=words):
        train_unet.train(model=network, data=str(small_set), **OWN_RUN)
    assert not os.path.exists('own')


def test_a_trained_network_is_not_advised_to_take_other_channels(two):
    with pytest.raises(train_unet.DataError) as error:
        train_unet.load(two[0]).predict(np.zeros((8, 8, 7), np.uint8))
    assert 'has 7 channels, in_channels=3' in str(error.value) and 'type' not in str(error.value)


def test_every_file_that_cannot_be_predicted_is_named(two, tmp_path, capsys):
    for number in range(12):
        (tmp_path / f'{number}.png').write_text('no picture')
    assert train_unet.main(['predict', str(two[0]), str(tmp_path), '-o', str(tmp_path / 'out')]) == 1
    told = capsys.readouterr().err
    assert all(f'{number}.png' in told for number in range(12))


def test_pooling_by_products_is_pooling():
    x = torch.randn(2, 3, 37, 20, generator=torch.Generator().manual_seed(0))
    for size in (1, 2, 6, (3, 5), (None, 7)):
        torch.testing.assert_close(train_unet.pool_by_product(x, size), torch.nn.functional.adaptive_avg_pool2d(x, size))


def test_the_command_and_python_read_a_wide_array_alike(two, tmp_path):
    image = np.asarray(PIL.Image.open(next((two[1] / 'images').iterdir()))).astype(np.int64)
    np.save(tmp_path / 'wide.npy', image)
    assert train_unet.main(['predict', str(two[0]), str(tmp_path / 'wide.npy'), '-o', str(tmp_path / 'out')]) == 0
    mask = np.asarray(PIL.Image.open(tmp_path / 'out' / 'wide.png'))
    assert (mask > 0).tolist() == (train_unet.load(two[0]).predict(image) > 0).tolist()


def test_a_sheet_takes_an_image_that_is_nearly_a_line(tmp_path):
    """A line-scan camera's 3,000 x 4 pixels would have no height at the size of a sheet."""
    page = train_unet.sheet([('line', [np.full((4, 3000, 3), 90, np.uint8)] * 2)], ['image', 'truth'], tmp_path / 'x.png')
    assert (np.asarray(page) == 90).any()


# ---------------------------------------------------------------- what a second look found


def test_scores_are_written_for_a_reader_who_has_left(two, tmp_path, monkeypatch):
    """train_unet.py evaluate runs/x | head -1: nobody reads what is printed, but all is written."""
    shutil.copytree(two[0], tmp_path / 'run')
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, contextlib.suppress(BrokenPipeError), open(writer, 'w', buffering=1) as screen:
        patch.setattr(sys, 'stdout', screen)
        train_unet.main(['evaluate', str(tmp_path / 'run')])
    tuned = json.loads((tmp_path / 'run' / 'metrics.json').read_text())['threshold']
    assert train_unet.load_checkpoint(tmp_path / 'run' / 'best.pt')['threshold'] == tuned != 0.5
    assert (tmp_path / 'run' / 'confusion.png').exists()


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


@pytest.mark.parametrize('size, wanted', [((60, 20), (16, 64)), ((20, 60), (64, 16)), ((60, 64), (16, 16)),
                                          ((20, 20), (64, 64))])
def test_rows_of_a_large_image_are_resized_as_a_whole_image_is(size, wanted):
    """Also where one side shrinks and the other grows; halves are rounded either way."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    whole, rows = train_unet.resize(image, *wanted), train_unet.shrink_by_rows(image, *wanted, step=7)
    if wanted[0] <= size[0]:                                           # rows are never made more in bands
        assert np.abs(whole.astype(int) - rows).max() <= 1
    assert whole.shape == (*wanted, 3) and abs(whole.mean() - image.mean()) < 3


@pytest.mark.parametrize('images, wanted', [(3, True), (4, False)])
def test_statistics_are_shared_where_a_gpu_has_few_images(monkeypatch, images, wanted):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, 2))
    monkeypatch.setattr(nn.Module, 'to', lambda self, *_, **__: self)
    monkeypatch.setattr(nn.parallel, 'DistributedDataParallel', lambda network, devices, **_: network)
    config = {**train_unet.CONFIG, 'batch_size': 2 * images, 'learning_rate': 0.01, 'ema_decay': None}
    state = train_unet.build_state(model, config, train_unet.Precision('float32', 'high', ''), torch.device('cuda'))
    assert any(isinstance(module, nn.SyncBatchNorm) for module in state.model.modules()) == wanted


def test_small_images_under_crop_are_tried_before_training(tmp_path, capsys):
    """PAN takes 128 x 128, but not the 64 x 64 that validation shows it of images that small."""
    data = draw_set(tmp_path / 'set')
    words = {'architecture': 'PAN', 'encoder': 'resnet18', 'image_size': 128, 'size_policy': 'crop', 'batch_size': 4,
             'use_amp': False, 'device': 'cpu', 'num_epochs': 1}
    for command in (train_unet.check, lambda _, how: train_unet.train(**how)):
        with pytest.raises(train_unet.ConfigError, match='cannot take .* or size_policy=resize'):
            command(None, {**words, 'data': str(data)})


def test_a_threshold_is_not_stored_beside_a_training_that_is_at_work(small_set, caplog):
    """Whether it holds the folder, or has put other weights there since."""
    from filelock import FileLock
    run = train_unet.train(data=str(small_set), **{**TINY, 'num_epochs': 1}).run_dir
    best = train_unet.load_checkpoint(run / 'best.pt')
    with FileLock(str(run / '.lock')):
        assert train_unet.main(['evaluate', str(run)]) == 0
    assert 'a training is at work there, so the best threshold' in caplog.text
    assert train_unet.load_checkpoint(run / 'best.pt')['threshold'] == best['threshold']
    stale = train_unet.load(run)
    newer = best | {'weights': {key: value + 1 for key, value in best['weights'].items()}, 'epoch': 99}
    train_unet.save_checkpoint(run / 'best.pt', newer)
    assert not train_unet.store_threshold(run, 0.7, stale) and train_unet.store_threshold(run, 0.6, train_unet.load(run))
    after = train_unet.load_checkpoint(run / 'best.pt')
    assert (after['epoch'], after['threshold']) == (99, 0.6)


def test_a_home_folder_is_written_as_a_tilde(small_set, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    result = train_unet.train(data=str(small_set), run_dir='~/mine', **{**TINY, 'num_epochs': 1})
    assert result.run_dir == tmp_path / 'mine' and train_unet.load('~/mine').config['num_classes'] == 2
    assert train_unet.train(resume='~/mine', num_epochs=2).history[-1]['epoch'] == 2
    assert train_unet.main(['evaluate', '~/mine']) == 0


def test_check_of_a_run_looks_at_its_data_and_settings(small_set, capsys):
    run = train_unet.train(data=str(small_set), **{**TINY, 'num_epochs': 1}).run_dir
    capsys.readouterr()
    assert train_unet.main(['check', f'resume={run}', 'num_epochs=3']) == 0
    printed = capsys.readouterr().out
    assert f'data                        {str(small_set)!r}' in printed and "'tu-test_resnet'" in printed
    assert train_unet.main(['tune', f'resume={run}']) == 2
    assert 'tune has no use for it' in capsys.readouterr().err


def test_predict_that_is_ended_in_the_middle_of_a_file_leaves_none_of_it(small_set, tmp_path):
    """SIGTERM as a scheduler sends it, while the first mask is on its way to the disk."""
    run = train_unet.train(data=str(small_set), **{**TINY, 'num_epochs': 1}).run_dir.resolve()
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site/sitecustomize.py').write_text(
        'import os, signal\nos.fsync = lambda file: os.kill(os.getpid(), signal.SIGTERM)\n')
    done = subprocess.run([sys.executable, ROOT / 'train_unet.py', 'predict', run, small_set / 'images', '-o', 'masks'],
                          env={**os.environ, 'PYTHONPATH': str(tmp_path / 'site')}, capture_output=True, timeout=120)
    assert done.returncode == 143 and os.listdir('masks') == []


# ---------------------------------------------------------------- advice that holds when it is typed


@pytest.mark.parametrize('words, advice', [
    (['data=x', 'check'], 'the command comes first'), (['configs/fast.py'], 'preset=configs/fast.py'),
    (['RUN'], 'resume='), (['export', 'RUN', 'onnx'], 'type format=onnx'), (['grad_clip=0'], 'or None'),
    (['mask_values={255:', '1}'], 'mask_values="{255: 1}", with the quotes')])
def test_words_in_the_wrong_place_are_told_what_they_should_be(two, monkeypatch, words, advice):
    monkeypatch.chdir(ROOT)
    with pytest.raises(train_unet.ConfigError) as caught:
        train_unet.parse_command([str(two[0]) if word == 'RUN' else word for word in words])
    assert advice in str(caught.value)


@pytest.mark.parametrize('command', ['train', 'check'])
def test_a_folder_that_holds_a_run_is_refused_with_a_line_that_can_be_typed(two, tmp_path, command, capsys):
    run = shutil.copytree(two[0], tmp_path / 'my run')
    assert train_unet.main([command, f'data={two[1]}', f'run_dir={run}', 'device=cpu']) == 2
    line, = re.findall(r'holds a run already; (.*) continues it', capsys.readouterr().err)
    assert train_unet.parse_overrides(shlex.split(line)) == ({'resume': str(run)}, [])


def test_a_resume_of_moved_data_wants_its_place(own, two, tmp_path, capsys):
    assert train_unet.main([f'resume={own}', 'num_epochs=7', f'data={tmp_path / "gone"}']) == 2
    assert 'there is no such folder' in capsys.readouterr().err
    assert train_unet.main([f'resume={own}', 'num_epochs=7', f'data={two[1]}']) == 0


def test_the_home_of_moved_data_may_be_typed_as_usual(own, two, monkeypatch):
    monkeypatch.setenv('HOME', str(two[1].parent))
    config, _, notes = train_unet.resume_config(own, None, {'data': f'~/{two[1].name}'})
    assert config['data'] == str(two[1]) and not notes


def test_who_comes_second_leaves_the_run_of_the_first_alone(two, tmp_path, monkeypatch):
    """Both saw no folder of that name; the other made it a moment sooner."""
    from filelock import FileLock
    run, real = tmp_path / 'run', train_unet.choose_run_dir
    lock = FileLock(str(run / '.lock'))

    def choose(*how):
        run.mkdir()
        lock.acquire()
        for name in ('config.py', 'last.pt', 'log.txt'):
            (run / name).write_text('of the other')
        return real(*how)

    monkeypatch.setattr(train_unet, 'choose_run_dir', choose)
    with pytest.raises(train_unet.UserError, match='is in use by'):
        train_unet.train(**SMALL, data=str(two[1]), run_dir=str(run))
    lock.release()
    assert (run / 'last.pt').read_text() == (run / 'config.py').read_text() == 'of the other'


def test_the_device_of_a_run_can_be_left_to_the_machine(own):
    settings = own / 'config.py'
    settings.write_text(settings.read_text().replace("'device': 'cpu'", "'device': 'cuda:1'"))
    assert train_unet.resume_config(own, None, {'device': 'auto'})[0]['device'] == 'auto'


def test_names_of_classes_that_the_network_does_not_know_are_refused(two, capsys):
    assert train_unet.main(['evaluate', str(two[0]), 'class_names=[a, b, c]', 'device=cpu']) == 2
    assert 'class_names has 3 names, there are 2 classes' in capsys.readouterr().err


def test_other_data_of_more_classes_is_told_what_the_network_knows(two, three, capsys):
    assert train_unet.main(['evaluate', str(two[0]), f'data={three[1]}', 'device=cpu']) == 2
    told = capsys.readouterr().err
    assert 'the network knows 2 classes' in told and 'num_classes=' not in told


def test_a_score_with_other_settings_says_so(own, capsys):
    assert train_unet.main(['evaluate', str(own), 'image_size=32', 'device=cpu']) == 0
    assert 'with image_size="[32, 32]"' in capsys.readouterr().out
    assert json.loads((own / 'metrics.json').read_text())['settings'] == {'image_size': [32, 32]}


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
    monkeypatch.setattr(train_unet, 'draw_samples', lambda *_, captions: drawn.update(captions))
    assert train_unet.main(['evaluate', str(own), f'data={tmp_path / "set"}', 'device=cpu', 'val_fraction=0']) == 0
    content, = (json.loads(path.read_text()) for path in own.glob('evaluation_*/metrics.json'))
    scores = [row['iou'] for row in content['images']]
    assert scores[:7] + scores[8:] == [0] * 14 and 0 < scores[7] < 0.5     # else this would show nothing
    assert next(iter(drawn)) == 7


def test_best_weights_that_lie_alone_are_named_in_the_next_line(own, two, tmp_path, capsys):
    alone = shutil.copy(own / 'best.pt', tmp_path / 'alone.pt')
    assert train_unet.main(['evaluate', str(alone), f'data={two[1]}', 'device=cpu']) == 0
    assert f'predict {alone} YOUR_IMAGES' in capsys.readouterr().out


@pytest.mark.parametrize('processes, batch, steps, line', [(2, 8, 1, 'batch_size=2 accumulation_steps=4'),
                                                           (4, 2, 4, 'batch_size=1 accumulation_steps=8')])
def test_advice_for_several_processes_out_of_memory_makes_each_hold_less(monkeypatch, processes, batch, steps, line):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, processes))
    state = SimpleNamespace(batch_size=batch)
    with pytest.raises(train_unet.UserError, match=line):
        train_unet.halve(state, {'batch_size': batch, 'accumulation_steps': steps})


def test_noise_of_another_share_is_no_other_coding(own, two, capsys, caplog):
    saved = train_unet.load_checkpoint(own / 'best.pt')
    words = '0 and 255 with {} of the pixels in between (JPEG noise or soft edges): above 127 is foreground'
    train_unet.save_checkpoint(own / 'best.pt', saved | {'coding': words.format('1.17%')})
    noisy = own.parent / 'noisy'
    shutil.copytree(two[1], noisy)
    for path in (noisy / 'masks').iterdir():
        mask = np.array(PIL.Image.open(path)).astype(int)
        draw = np.random.default_rng(0).integers(0, 20, mask.shape)
        PIL.Image.fromarray(np.where(mask > 127, mask - draw, mask + draw).astype(np.uint8)).save(path)
    assert train_unet.main(['evaluate', str(own), f'data={noisy}', 'device=cpu']) == 0
    assert 'in between (JPEG noise' in capsys.readouterr().out and 'not coded as in training' not in caplog.text


def test_a_confusion_matrix_of_many_classes_stays_a_picture(tmp_path):
    train_unet.draw_confusion(torch.eye(150), [f'class {number}' for number in range(150)], tmp_path / 'many.png')
    assert max(PIL.Image.open(tmp_path / 'many.png').size) < 4500
