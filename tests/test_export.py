"""Export: ONNX, pt2 and smp files, each compared with the network that it was made of.

Run: python -m pytest tests/test_export.py
"""
import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
import types
import warnings
import zipfile
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import PIL.Image
import pytest
import safetensors
import segmentation_models_pytorch as smp
import torch
from torch import nn

import train_unet as tu
from conftest import ENOUGH, FORKS, ROOT, TINY, WRITES_ONNX, draw_set, made_once, run_script
from helpers import edited

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def pictures():
    """Batches of three with odd sides, as the three-class network takes them."""
    draw = torch.Generator().manual_seed(0)
    sizes = (51, 77), (64, 129)
    return [torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8, generator=draw) for size in sizes]


def assert_same_logits(run, other, images):
    """A model and its exported self, on batches of images."""
    model = tu.load(run, 'cpu')
    for batch in images:
        with torch.no_grad():
            torch.testing.assert_close(other(batch), model(batch), rtol=0, atol=1e-4)


def facts_of(path):
    """The metadata of an ONNX file."""
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def run_onnx(path):
    """A function that runs an ONNX file on images."""
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return lambda images: torch.as_tensor(session.run(None, {'images': images.numpy()})[0])


def assert_facts(facts, classes):
    """What a program that loads the file must know."""
    assert 0 < float(facts['threshold']) < 1 and json.loads(facts['classes']) == classes
    assert facts['input'] == 'RGB, uint8, as stored' and json.loads(facts['image_size']) == [64, 64]


@pytest.fixture(scope='module')
def onnx_of_three(three, tmp_path_factory):
    """An ONNX file of the three-class run: writing one takes seconds."""
    def make(folder):
        folder.mkdir()                                                 # in which it gets the usual name
        assert tu.main(['export', str(three[0]), 'format=onnx', '-o', str(folder)]) == 0
    return made_once(tmp_path_factory, 'onnx', make)[0].with_name('model.onnx')


@pytest.fixture(scope='module')
def pt2_of_three(three, tmp_path_factory):
    """Its PT2 file, and what was warned of."""
    def make(folder):
        with warnings.catch_warnings(record=True) as told:
            assert tu.export(three[0], 'pt2', folder / 'model.pt2') == 0
        (folder / 'told.txt').write_text(' '.join(str(one.message) for one in told))
    path = made_once(tmp_path_factory, 'pt2', make)[0].with_name('model.pt2')
    return path, path.with_name('told.txt').read_text()


@pytest.fixture(scope='module')
def smp_of_three(three, tmp_path_factory):
    """Its folders of smp, {half: folder}, and what was said of the second one's half precision."""
    folders = {half: tmp_path_factory.mktemp('smp') / 'out' for half in (False, True)}
    for half, folder in folders.items():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert tu.export(three[0], 'smp', folder, half) == 0
    return folders, said.getvalue()


@pytest.mark.parametrize('policy, told', [('resize', 'INTER_AREA'), ('crop', 'overlapping tiles'),
                                          ('pad', 'overlapping tiles')])
def test_what_a_file_tells_of_how_predict_treats_sizes(two, policy, told):
    model = tu.load(two[0], 'cpu')
    model.config['size_policy'] = policy
    note = tu.export_facts(model)['note']
    assert [words for words in ('INTER_AREA', 'overlapping tiles') if words in note] == [told]


# --- onnx -----------------------------------------------------------------------------


@WRITES_ONNX
def test_onnx_of_three_classes_agrees_and_says_what_it_needs(three, onnx_of_three, pictures):
    assert_same_logits(three[0], run_onnx(onnx_of_three), pictures)
    assert_facts(facts_of(onnx_of_three), ['ground', 'disc', 'corner'])


@WRITES_ONNX
def test_exports_of_16_bit_images_take_them_as_stored_in_every_size_although_the_network_pools(tmp_path, monkeypatch):
    data, run = draw_set(tmp_path / 'set'), tmp_path / 'run'
    for path in sorted((data / 'images').iterdir()):
        grey = np.asarray(PIL.Image.open(path).convert('L'))
        PIL.Image.fromarray(grey.astype(np.uint16) * 250).save(path)
    words = ENOUGH | {'architecture': 'PSPNet', 'num_epochs': 1}
    tu.train(**words, data=str(data), in_channels=1, run_dir=str(run))
    assert tu.export(run, 'onnx') == 0
    assert torch.nn.functional.adaptive_avg_pool2d is not tu.pool_by_product
    stored = torch.from_numpy(np.array(PIL.Image.open(path)))[None, None]
    assert stored.dtype == torch.uint16 and stored.shape == (1, 1, 40, 40)
    assert facts_of(run / 'model.onnx')['input'] == 'uint16, as stored'
    written, model, odd = run_onnx(run / 'model.onnx'), tu.load(run, 'cpu'), stored.repeat(3, 1, 3, 4)[..., :51, :129]
    for images in (stored, odd):
        with torch.no_grad():
            wanted = model(images.float() / 65535)
        torch.testing.assert_close(written(images), wanted, rtol=0, atol=1e-4)
    image = stored[0, 0].numpy()
    assert model.predict(image).tolist() == model.predict(path).tolist()
    data.rename(tmp_path / 'gone')
    seen = []
    monkeypatch.setattr(tu, 'export_onnx', lambda model, *_: seen.append(model.config['image_dtype']) or model)
    tu.export(run, 'onnx')                                             # which writes nothing now
    assert seen == ['uint16']                                          # as the run has it, whatever is left to look at
    for other in (image.astype(np.int32), torch.tensor(image.astype(np.int64)), image.astype(np.float32)):
        with pytest.raises(tu.DataError, match='stored as uint16'):
            model.predict(other)
    np.save(tmp_path / 'wide.npy', image.astype(np.int32))
    assert tu.predict(run, [str(tmp_path / 'wide.npy')], tmp_path / 'out') == 1  # as in Python
    scene = np.where(np.arange(40) < 15, -9999, image / np.float32(65535)).astype(np.float32)
    assert model.predict(scene).shape == (40, 40)                      # a rim of no data is no other scale


def test_pooling_by_products_is_pooling():
    x = torch.randn(2, 3, 37, 20, generator=torch.Generator().manual_seed(0))
    for size in (1, 2, 6, (3, 5), (None, 7)):
        torch.testing.assert_close(tu.pool_by_product(x, size), torch.nn.functional.adaptive_avg_pool2d(x, size))


@WRITES_ONNX
def test_half_onnx_is_half_as_large_and_runs(three, onnx_of_three, tmp_path, capsys, monkeypatch):
    """Of the graph that has been traced: to do that again takes ten seconds."""
    graph = onnx.load(onnx_of_three)
    del graph.metadata_props[:]
    monkeypatch.setattr(torch.onnx, 'export', lambda *_, **__: types.SimpleNamespace(model_proto=graph))
    typed = ['export', str(three[0]), 'format=onnx', 'half=True', '-o', str(tmp_path / 'm.onnx')]
    assert tu.main(typed) == 0
    assert 'on 2 validation images and 4 drawn ones' in capsys.readouterr().out
    weights = sum(4 * weight.numel() for weight in tu.load(three[0]).parameters())
    assert os.path.getsize(tmp_path / 'm.onnx') < 0.7 * weights
    assert_facts(facts_of(tmp_path / 'm.onnx'), ['ground', 'disc', 'corner'])


# --- pt2 ------------------------------------------------------------------------------


def test_pt2_of_three_classes_agrees_and_says_what_it_needs(three, pt2_of_three, pictures):
    path, told = pt2_of_three
    assert 'No complete tensor' not in told
    facts = dict.fromkeys(['threshold', 'classes', 'input', 'image_size'], '')
    program = torch.export.load(path, extra_files=facts).module()
    assert_same_logits(three[0], program, pictures)
    assert_facts(facts, ['ground', 'disc', 'corner'])


def test_real_and_drawn_images_are_compared_apart(own, tmp_path, monkeypatch):
    """Noise has larger logits, and with them a wider bound."""
    compared, drawn = [], tu.drawn_images
    monkeypatch.setattr(tu, 'drawn_images', lambda *given: ['drawn' for _ in drawn(*given)])
    monkeypatch.setattr(tu, 'compare_exported', lambda *given: compared.append(given[2]) or (0.0, 1.0))
    assert tu.export(own, 'smp', tmp_path / 'model') == 0
    assert [{type(image) for image in images} for images in compared] == [{torch.Tensor}, {str}]


def test_no_export_asks_timm_how_tensorflow_pads_whose_answer_for_free_sizes_sympy_never_ends(
        own, tmp_path, monkeypatch):
    from timm.layers import Conv2dSame, padding
    for numbers in itertools.product(range(1, 40), (1, 2, 3, 5), (1, 2, 4), (1, 2)):
        assert tu.same_padding(*numbers) == padding.get_same_padding(*numbers)
    model = tu.load(own, 'cpu')
    model.network = nn.Sequential(Conv2dSame(3, 4, 3, 2), Conv2dSame(4, 4, 5, 2), nn.Upsample(scale_factor=4),
                                  nn.Conv2d(4, 1, 1))
    monkeypatch.setattr(tu, 'load', lambda *_: model)
    monkeypatch.setattr(tu, 'drawn_images', lambda *_: [0])            # they ask while nothing is traced
    monkeypatch.setattr(tu, 'example_images', lambda *_: [])
    monkeypatch.setattr(padding, 'get_same_padding', lambda *_: pytest.fail('asked'))
    monkeypatch.setattr(tu, 'compare_exported', lambda *_: (0.0, 1.0))
    assert tu.export(own, 'pt2', tmp_path / 'm.pt2') == 0


def test_pt2_of_a_network_for_small_images_is_written_for_their_size(small_set, tmp_path, capsys, monkeypatch):
    """torch.export wants sides above 32 pixels where they are free."""
    monkeypatch.setattr(tu, 'build_network', lambda config: few_layers(5))     # down to a single pixel, as a Unet's
    run = tu.train(**TINY | {'num_epochs': 1}, data=str(small_set)).run_dir
    assert tu.export(run, 'pt2', tmp_path / 'm.pt2') == 0
    assert 'it takes images of 32 x 32 only' in capsys.readouterr().out
    program = torch.export.load(tmp_path / 'm.pt2').module()
    assert program(torch.zeros(3, 3, 32, 32, dtype=torch.uint8)).shape == (3, 1, 32, 32)


class OneSize(nn.Module):
    """As a DPT's encoder is: it takes images of 64 x 64 only."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        if images.shape[-2:] != (64, 64):
            raise ValueError('the height does not match')
        return self.network(images)


def few_layers(halvings=1):
    """A network that is exported in a second."""
    parts = [part for n in range(halvings)
             for part in (nn.Conv2d(4 if n else 3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*parts, nn.Upsample(scale_factor=2 ** halvings), nn.Conv2d(4, 1, 1))


def test_a_network_that_takes_one_size_is_exported_for_that_size(small_set, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tu, 'build_network', lambda config: OneSize(few_layers()))
    run = tu.train(**ENOUGH | {'num_epochs': 1}, data=str(small_set)).run_dir
    assert tu.export(run, 'pt2', tmp_path / 'model.pt2') == 0
    said = capsys.readouterr().out
    assert 'and 1 drawn ones' in said and 'it takes images of 64 x 64 only: Unet cannot be written' in said
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    program = torch.export.load(tmp_path / 'model.pt2').module()
    with torch.no_grad():
        torch.testing.assert_close(program(images), tu.load(run)(images), atol=1e-4, rtol=0)


# --- smp ------------------------------------------------------------------------------


def test_half_smp_is_half_as_large_and_says_what_it_needs(smp_of_three):
    sizes = []
    for folder in smp_of_three[0].values():
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
        assert_facts(json.loads((folder / 'preprocessing.json').read_text()), ['ground', 'disc', 'corner'])
    assert sizes[1] < 0.65 * sizes[0]


def test_a_folder_of_smp_says_how_images_of_odd_sizes_are_padded(three, smp_of_three):
    """smp's networks take them without a word, and give other logits."""
    folder = smp_of_three[0][False]
    facts = json.loads((folder / 'preprocessing.json').read_text())
    step = int(re.search(r'multiples of (\d+)', facts['padding'])[1])
    image = torch.randint(0, 256, (1, 3, 50, 77), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(facts[key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    padded = torch.nn.functional.pad((image / 255 - mean) / std, (0, -77 % step, 0, -50 % step))
    network = smp.from_pretrained(folder).eval()
    assert_same_logits(three[0], lambda images: network(padded)[..., :50, :77], [image])


def test_what_half_export_says_is_the_difference_to_the_trained_network(three, smp_of_three):
    """Not to the weights that were rounded already."""
    folders, printed = smp_of_three
    said = float(re.search(r'difference of a logit is ([\d.e+-]+)', printed)[1])
    again = tu.smp.from_pretrained(folders[True]).float().eval()
    model, worst = tu.load(three[0], 'cpu'), 0.0
    with torch.no_grad():
        for images in tu.example_images(model.config):
            real = (model(images) - again((images.float() - model.mean) / model.std)).abs().max()
            worst = max(worst, float(real))
    assert 1.01 * said >= worst > 1e-5                                 # three digits are said


def test_an_export_is_not_asked_for_sizes_that_the_network_does_not_take(small_set, tmp_path):
    words = TINY | {'architecture': 'PAN', 'encoder': 'tu-test_resnet', 'image_size': 128, 'num_epochs': 1}
    run = tu.train(**words, data=str(small_set)).run_dir
    assert tu.export(run, 'smp', tmp_path / 'smp') == 0


def test_an_export_whose_data_is_gone_says_that_it_was_checked_on_drawn_images_only(own, tmp_path, capsys):
    with edited(own / 'best.pt') as saved:
        saved['config']['data'] = str(tmp_path / 'moved away')
    assert tu.export(own, 'smp', tmp_path / 'out') == 0
    said = capsys.readouterr().out
    assert 'checked on drawn images only' in said and 'on 0 validation images and 4 drawn ones' in said


# --- what is refused, and what is left then -------------------------------------------


def test_an_export_that_differs_is_refused_and_leaves_the_one_before(two, tmp_path, monkeypatch):
    """A file with one other weight in it is found out; what was verified yesterday is worth more than it."""
    path, real = tmp_path / 'smp' / 'model.safetensors', smp.from_pretrained
    path.parent.mkdir()
    path.write_bytes(b'yesterday')

    def spoiled(path):
        network = real(path)
        next(network.parameters()).data.add_(0.5)
        return network

    monkeypatch.setattr(smp, 'from_pretrained', spoiled)
    with pytest.raises(tu.UserError, match='does not agree'):
        tu.export(two[0], 'smp', path.parent)
    assert path.read_bytes() == b'yesterday' and sorted(os.listdir(tmp_path)) == ['cache', 'smp']


def test_a_network_with_nan_is_not_exported(own, tmp_path):
    with edited(own / 'best.pt') as saved:
        saved['weights']['network.segmentation_head.0.bias'][0] = math.nan
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'mine.txt').write_text('not yours')
    with pytest.raises(tu.UserError, match='does not agree.*nan'):
        tu.export(own, 'smp', tmp_path / 'out')
    left = {path.name for path in (tmp_path / 'out').iterdir()}
    assert 'mine.txt' in left and not left & {'config.json', 'model.safetensors', 'preprocessing.json'}


def test_half_export_keeps_the_norms_of_which_float16_holds_no_statistics(own, tmp_path):
    with edited(own / 'best.pt') as saved:
        name = next(key for key in saved['weights'] if key.endswith('running_var'))
        saved['weights'][name] *= 1e9
        saved['weights'][name.replace('running_var', 'weight')] *= 1e9 ** 0.5
    assert tu.export(own, 'smp', tmp_path / 'out', half=True) == 0


def test_half_export_of_weights_that_float16_cannot_hold_is_refused(own, tmp_path):
    with edited(own / 'best.pt') as saved:
        next(value for key, value in saved['weights'].items() if key.endswith('.weight') and value.ndim == 4).mul_(1e7)
    with pytest.raises(tu.UserError, match='does not agree|does not run'):
        tu.export(own, 'smp', tmp_path / 'out', half=True)


def test_an_export_that_fails_before_it_writes_removes_nothing(own, tmp_path, monkeypatch):
    (tmp_path / 'model.pt2').write_text('an older one')

    def fail(*_, **__):
        raise RuntimeError('no')

    monkeypatch.setattr(torch.export, 'export', fail)
    with pytest.raises(tu.UserError, match='cannot be written'):
        tu.export(own, 'pt2', tmp_path / 'model.pt2')
    assert (tmp_path / 'model.pt2').read_text() == 'an older one'


@pytest.mark.usefixtures('forks')
@pytest.mark.parametrize('form', ['pt2', 'smp'])
def test_a_disk_that_is_full_ends_an_export_in_words(two, tmp_path, pt2_of_three, form):
    """Of a program that has been traced: to do that again takes two seconds."""
    small = f"""
import resource, torch
torch.export.export = lambda *_, **__: torch.export.load({str(pt2_of_three[0])!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
"""
    path = tmp_path / 'new' / 'm.pt2'
    words = ['export', str(two[0]), f'format={form}', '-o', str(path)]
    process = FORKS.Process(target=run_script, args=(words, tmp_path / 'said', {}, small))
    process.start()
    process.join()
    said = (tmp_path / 'said').read_text()
    assert process.exitcode == 2 and 'File too large' in said and 'Traceback' not in said and str(path) in said, said
    assert not [*(tmp_path / 'new').rglob('*.*t*')]


@pytest.mark.parametrize('fault', [safetensors.SafetensorError('Cannot allocate memory (os error 12)'),
                                   OSError('Cannot allocate memory (os error 12)')])
def test_too_little_memory_to_read_an_export_back_is_told_in_words(two, tmp_path, monkeypatch, fault, capsys):
    """A traceback, and '[Errno None] None'."""
    monkeypatch.setattr(smp, 'from_pretrained', Mock(side_effect=fault))
    assert tu.main(['export', str(two[0]), 'format=smp', '-o', str(tmp_path / 'new' / 'm')]) == 2
    assert 'm: Cannot allocate memory' in capsys.readouterr().err and not [*(tmp_path / 'new').iterdir()]


def test_an_exporter_that_lacks_what_it_needs_is_told_in_a_line(two, tmp_path, monkeypatch, capsys):
    """As with the ml_dtypes that an older TensorFlow asks for."""
    lacking = Mock(side_effect=AttributeError("module 'ml_dtypes' has no attribute 'float4_e2m1fn'"))
    monkeypatch.setattr(torch.onnx, 'export', lacking)
    assert tu.main(['export', str(two[0]), '-o', str(tmp_path / 'm.onnx')]) == 2
    assert "module 'ml_dtypes' has no attribute" in capsys.readouterr().err


def test_several_formats_are_refused(two, capsys):
    assert tu.main(['export', str(two[0]), "format=['onnx','pt2']"]) == 2
    assert 'onnx, pt2, smp' in capsys.readouterr().err
    with pytest.raises(tu.UserError, match='onnx, pt2, smp'):
        tu.export(two[0], format=['onnx', 'pt2'])


@pytest.mark.parametrize('name, half, told', [('m.onnx', False, 'ends in .pt2'), ('m.pt2', True, 'half=True')])
def test_a_refused_export_leaves_no_folder(two, tmp_path, name, half, told):
    with pytest.raises(tu.UserError, match=told):
        tu.export(two[0], 'pt2', tmp_path / 'new' / 'deep' / name, half)
    assert not (tmp_path / 'new').exists()


def test_an_export_replaces_no_other_file(two, tmp_path):
    folder = tmp_path / 'mine'
    folder.mkdir()
    (folder / 'README.md').write_text('mine')
    shutil.copy(two[0] / 'best.pt', folder)
    with pytest.raises(tu.UserError, match='ends in .onnx'):           # onnx is the default: the model would be gone
        tu.export(two[0], output=folder / 'best.pt')
    for _ in range(2):
        tu.export(two[0], 'smp', folder)
    assert sorted(os.listdir(folder)) == ['README.md', 'best.pt', 'model_smp']
    assert (folder / 'README.md').read_text() == 'mine'


def test_a_folder_that_cannot_be_written_is_one_line(two, tmp_path, capsys):
    (tmp_path / 'taken').write_text('x')
    assert tu.main(['export', str(two[0]), '-o', str(tmp_path / 'taken' / 'model.onnx')]) == 2
    assert 'taken' in capsys.readouterr().err


# --- what the files tell of this machine ----------------------------------------------


@WRITES_ONNX
def test_exports_do_not_tell_where_the_program_lies(onnx_of_three, pt2_of_three):
    with zipfile.ZipFile(pt2_of_three[0]) as file:
        contents = [onnx_of_three.read_bytes(), *map(file.read, file.namelist())]
    for folder in {os.path.dirname(module.__file__) for module in (tu, torch, tu.smp)}:
        assert not any(os.fsencode(folder) in content for content in contents)


@pytest.mark.parametrize('is_there', [True, False])
def test_packages_that_onnx_lacks_or_has_too_old_are_named(own, tmp_path, monkeypatch, capsys, is_there):
    """torch 2.14 imports a module of onnxscript that is of 2026."""
    def export(*_, **__):
        raise ModuleNotFoundError("No module named 'onnxscript._framework_apis.torch_2_11'")

    monkeypatch.setattr(torch.onnx, 'export', export)
    monkeypatch.setitem(sys.modules, 'onnxruntime', types.ModuleType('onnxruntime') if is_there else None)
    assert tu.main(['export', str(own), '-o', str(tmp_path / 'm.onnx')]) == 2
    told = capsys.readouterr().err
    assert ('torch_2_11' if is_there else 'onnxruntime') in told and 'pip install -U onnx' in told


@WRITES_ONNX
def test_the_onnx_lines_of_the_readme_decide_as_predict_does(small_set, monkeypatch):
    """A lossless photo, for OpenCV and Pillow decode JPEG a little differently."""
    monkeypatch.setattr(tu, 'build_network', lambda config: few_layers())
    tu.train(**ENOUGH | {'num_epochs': 1}, data=str(small_set), run_dir='runs/NAME-1')
    PIL.Image.open(small_set / 'images/000.png').resize((120, 90)).save('photo.png')
    with edited('runs/NAME-1/best.pt') as saved:                       # half of the photo is foreground
        saved['threshold'] = float(np.median(tu.load('runs/NAME-1', 'cpu').probabilities('photo.png')))
    assert tu.main(['export', 'runs/NAME-1']) == 0
    block = re.search(r'```python\n(  import json, math, cv2, onnxruntime\n.*?)  ```', (ROOT / 'README.md').read_text(),
                      re.DOTALL)[1]
    exec(textwrap.dedent(block).replace('photo.jpg', 'photo.png'), lines := {})
    wanted = tu.load('runs/NAME-1', 'cpu').predict('photo.png') > 0
    assert lines['mask'].shape == wanted.shape and (lines['mask'] == wanted).mean() > 0.98 > wanted.mean() > 0.02
