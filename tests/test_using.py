"""Using a model: load, evaluate, predict, export, the notebook.  python -m pytest tests/test_using.py"""
import importlib.util
import io
import json
import os
import re
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import tifffile
import torch

import train_unet
from conftest import ROOT, TINY, WRITES_ONNX, draw_set


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A small trained run and its data: (run folder, data folder)."""
    folder = tmp_path_factory.mktemp('trained')
    data = draw_set(folder / 'set', count=16)
    run = folder / 'run'
    train_unet.train(**TINY | {'num_epochs': 6, 'image_size': 64}, data=str(data), run_dir=str(run))
    return run, data


def images_of(run):
    """The validation images of a run, as evaluate names them."""
    return [row['file'] for row in json.loads((run / 'metrics.json').read_text())['images']]


def test_predicted_files_score_what_evaluate_says(trained, tmp_path):
    """The masks that predict wrote, compared pixel by pixel, give evaluate's IoU at its threshold, exactly."""
    run, data = trained
    assert train_unet.evaluate_run(run, {}) == 0
    report = json.loads((run / 'metrics.json').read_text())
    assert train_unet.load(run).threshold == report['threshold']
    files = images_of(run)
    assert train_unet.predict(run, files, tmp_path / 'masks') == 0
    counts = 0
    for file in files:
        name = os.path.basename(file)
        mask = np.array(PIL.Image.open(tmp_path / 'masks' / name)) // 255
        truth = np.array(PIL.Image.open(data / 'masks' / name)) // 255
        counts = counts + train_unet.confusion_matrix(torch.tensor(mask), torch.tensor(truth), 2)
    assert train_unet.compute_metrics(counts)['iou'] == report['metrics_at_threshold']['iou'] > 0.5
    assert {'worst.png', 'confusion.png', 'metrics.json'} <= {p.name for p in run.iterdir()}


def test_load_takes_paths_pictures_arrays_and_tensors(trained):
    run, data = trained
    model, path = train_unet.load(run), data / 'images' / '003.png'
    picture = PIL.Image.open(path)
    array = np.array(picture)
    tensor = torch.tensor(array).permute(2, 0, 1)
    masks = [model.predict(x) for x in (path, str(path), picture, array, tensor, tensor / 255, (tensor / 255).half())]
    assert masks[0].shape == (40, 40) and masks[0].dtype == np.uint8 and 0 < masks[0].mean() < 1
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    for wrong in (tensor.float(), tensor[None] / 255, array / 255):        # 0 to 255 in floats; a batch; an array
        with pytest.raises(train_unet.DataError, match='8-bit images|3 x height x width'):
            model.predict(wrong)


def test_predict_keeps_names_and_size_and_survives_a_broken_file(trained, tmp_path, capsys):
    run, data = trained
    folder = tmp_path / 'mine' / 'deeper'
    folder.mkdir(parents=True)
    PIL.Image.new('RGB', (61, 33)).save(folder / 'a photo.jpg')
    (folder / 'broken.png').write_bytes(b'no image')
    assert train_unet.predict(run, [str(tmp_path / 'mine')], tmp_path / 'out') == 1
    assert PIL.Image.open(tmp_path / 'out' / 'deeper' / 'a photo.png').size == (61, 33)
    assert 'broken.png' in capsys.readouterr().err


@pytest.mark.parametrize('save, mode', [('mask', 'L'), ('palette', 'P'), ('overlay', 'RGB'), ('probability', 'L')])
def test_what_predict_can_save(trained, tmp_path, save, mode):
    run, data = trained
    train_unet.predict(run, [str(data / 'images' / '001.png')], tmp_path, save=save, tta=True)
    picture = PIL.Image.open(tmp_path / '001.png')
    assert picture.mode == mode and picture.size == (40, 40)
    assert len(np.unique(np.array(picture))) > (1 if save in ('mask', 'palette') else 2)


def test_an_export_that_differs_is_refused_and_leaves_the_one_before(trained, tmp_path, monkeypatch):
    """A file with one other weight in it is found out; what was verified yesterday is worth more than it."""
    path = tmp_path / 'model.pt2'
    path.write_bytes(b'yesterday')
    real = torch.export.load

    def spoiled(path):
        program = real(path)
        next(iter(program.parameters())).data.add_(0.5)
        return program

    monkeypatch.setattr(torch.export, 'load', spoiled)
    with pytest.raises(train_unet.UserError, match='does not agree'):
        train_unet.export(trained[0], 'pt2', path)
    assert path.read_bytes() == b'yesterday' and sorted(os.listdir(tmp_path)) == ['cache', 'model.pt2']


@WRITES_ONNX
def test_the_four_commands_follow_from_each_other(tmp_path, capsys):
    """Train, evaluate, predict, export: each time what the one before has printed (.ci/run types them in a shell)."""
    draw_set(tmp_path / 'set', count=8)
    settings = [f'{key}={value}' for key, value in (TINY | {'num_epochs': 1}).items()]
    typed = 'python train_unet.py data=set ' + shlex.join(settings)
    steps = [('evaluate', 'best.pt'), ('predict', 'worst.png'), ('export', 'predictions/007.png'), ('', 'model.onnx')]
    for word, file in steps:
        python, script, *words = shlex.split(typed)
        assert (python, script) == ('python', 'train_unet.py')
        assert train_unet.main(words) == 0
        assert (tmp_path / 'runs' / 'set-1' / file).exists()
        printed = capsys.readouterr().out
        typed = ''.join(re.findall('Next:  (.*)', printed)).replace('YOUR_IMAGES -o masks', 'set/images')
        assert f'{word} runs/set-1' in typed or not word


NOTEBOOK = TINY | {'encoder': 'tu-test_efficientnet', 'num_epochs': 1, 'compile_model': False}
# The stop button of Jupyter sends SIGINT to the kernel; here once an epoch is done.
INTERRUPTED = """
import os, signal, threading, time
def stop():
    while not os.path.exists('long/history.csv'):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop).start()
result = train_unet.train(data='set', {tiny}, run_dir='long', early_stopping_patience=None)
print('stopped by', int(result.stopped_by), 'after', len(result.history), result.best['epoch'])
""".replace('{tiny}', '**dict({tiny}) | dict(num_epochs=10 ** 5)')
MODELS = 'import gc; gc.collect(); print(sum(isinstance(x, train_unet.SegmentationModel) for x in gc.get_objects()))'


def test_the_notebook_lines_of_the_readme_run(tmp_path):
    """In a real kernel, twice; pictures appear; a second run does not keep the first one's memory."""
    import nbclient
    import nbformat
    draw_set(tmp_path / 'set', count=8)
    block = re.search(r'## In a notebook\s+```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)[1]
    tiny = ', '.join(f'{k}={v!r}' for k, v in NOTEBOOK.items())
    block = block.replace("num_epochs=5", tiny).replace("'PATH'", "'set'").replace('photo.jpg', 'set/images/001.png')
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) == 4
    setup = f'import sys; sys.path.insert(0, {str(ROOT)!r})'
    interrupted = INTERRUPTED.format(tiny=tiny)
    cells = [setup, *lines[:3], MODELS, *lines[1:3], MODELS, *lines[2:], 'print(mask.shape)', interrupted,
             "print('and on')"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {'metadata': {'path': str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=200, kernel_name='python3', resources=where).execute()
    outputs = [output for cell in book.cells for output in cell.get('outputs', [])]
    assert sum('val loss' in output.get('data', {}).get('text/html', '') for output in outputs) == 3   # the history
    shown = [output for output in outputs if 'text/html' in output.get('data', {})]
    assert sum('data:image/png;base64' in output['data']['text/html'] for output in shown) == 3
    said = [''.join(output.get('text', '') for output in cell.outputs if output.get('name') == 'stdout')
            for cell in book.cells]
    assert '(40, 40)' in said[-3] and 'stopped by 2 after' in said[-2] and 'and on' in said[-1]
    assert said[4] == said[7] and int(said[4]) >= 1


@pytest.mark.parametrize('layout', [{'tile': (32, 48), 'compression': 'zlib'}, {'rowsperstrip': 7, 'predictor': True,
                                    'compression': 'zlib'}, {'rowsperstrip': 150}, {}])
@pytest.mark.parametrize('policy', ['resize', 'crop'])
def test_a_large_tiff_is_read_and_written_by_rows(trained, tmp_path, monkeypatch, layout, policy):
    """The mask equals that of the same image read whole, and no call asks for more rows than a tile needs."""
    run, _ = trained
    image = np.random.default_rng(0).integers(0, 255, (150, 170, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / 'big.tif', image, photometric='rgb', **layout)
    settings = {'size_policy': policy, 'image_size': [64, 64]}
    for save in ('mask',) if layout else ('mask', 'palette', 'overlay', 'probability'):
        train_unet.predict(run, [str(tmp_path / 'big.tif')], tmp_path / 'whole', save=save, **settings)
        asked, original = [], train_unet.TiffRows.__getitem__
        monkeypatch.setattr(train_unet.TiffRows, '__getitem__',
                            lambda self, rows: asked.append(rows.stop - rows.start) or original(self, rows))
        monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 1000)
        assert train_unet.predict(run, [str(tmp_path / 'big.tif')], tmp_path / 'rows', save=save, **settings) == 0
        monkeypatch.undo()
        written = tifffile.imread(tmp_path / 'rows' / 'big.tif')
        assert np.array_equal(written, np.array(PIL.Image.open(tmp_path / 'whole' / 'big.png')))
        assert asked and (policy == 'resize' or max(asked) <= 64)


def test_an_overlay_has_one_contrast_however_many_bands_it_comes_in(tmp_path):
    """A ramp of 16-bit values stays a ramp where two bands meet."""
    image = np.linspace(0.2, 0.4, 100, dtype=np.float32)[:, None, None].repeat(40, 1).repeat(3, 2)
    bands = torch.full((2, 1, 50, 40), -5.0)                           # background everywhere
    model = SimpleNamespace(config={'num_classes': 2}, threshold=0.5)
    train_unet.write_prediction(tmp_path / 'ramp.png', image, bands, model, 'overlay')
    column = np.array(PIL.Image.open(tmp_path / 'ramp.png'))[:, 0, 0].astype(int)
    assert column[0] < 5 and column[-1] > 250 and 0 <= np.diff(column).min() and np.diff(column).max() < 8


def test_a_large_tiff_that_breaks_further_down_costs_no_other(trained, tmp_path, monkeypatch, capsys):
    run, data = trained
    image = np.random.default_rng(0).integers(0, 255, (150, 170, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / 'big.tif', image, photometric='rgb', rowsperstrip=10, compression='zlib')
    content = bytearray((tmp_path / 'big.tif').read_bytes())
    with tifffile.TiffFile(tmp_path / 'big.tif') as file:
        begin = file.pages[0].dataoffsets[9]
    content[begin:begin + 200] = b'x' * 200
    (tmp_path / 'big.tif').write_bytes(content)
    monkeypatch.setattr(train_unet, 'WINDOWED_ABOVE', 1000)
    inputs = [str(tmp_path / 'big.tif'), str(data / 'images' / '001.png')]
    assert train_unet.predict(run, inputs, tmp_path / 'out', size_policy='crop', image_size=[64, 64]) == 1
    assert 'big.tif' in capsys.readouterr().err
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['001.png']


def test_a_batch_predicts_what_single_images_predict(trained, tmp_path):
    run, data = trained
    model = train_unet.load(run)
    images = [(i, np.array(PIL.Image.open(data / 'images' / f'{i:03d}.png'))) for i in range(5)]
    sizes = []
    hook = model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    together = [mask for _, _, mask in train_unet.decide_stream(model, images)]
    assert sizes == [4, 1]                                             # TINY's batch_size is 4
    hook.remove()
    assert all(np.array_equal(mask, model.predict(image)) for mask, (_, image) in zip(together, images))


def test_evaluating_other_data_keeps_the_threshold_of_the_run(trained, tmp_path, capsys):
    run, _ = trained
    train_unet.store_threshold(run, 0.35, train_unet.load(run))
    assert train_unet.evaluate_run(run, {'data': str(draw_set(tmp_path / 'other', count=8))}) == 0
    assert 'threshold 0.35' in capsys.readouterr().out and train_unet.load(run).threshold == 0.35


def test_the_curves_of_one_epoch_have_no_fractions_of_it(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    ticks = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: ticks.extend(figure.axes[0].get_xticks()))
    train_unet.draw_curves([{'event': '', 'epoch': 1, 'train_loss': 0.5, 'val_loss': 0.4}], tmp_path / 'curves.png')
    assert ticks == [round(tick) for tick in ticks]


def test_tensorboard_gets_curves_and_pictures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    data = draw_set(tmp_path / 'set', count=8)
    train_unet.train(**TINY | {'num_epochs': 2}, data=str(data), run_dir=str(tmp_path / 'run'), tensorboard=True)
    events = EventAccumulator(str(tmp_path / 'run' / 'tensorboard'))
    events.Reload()
    assert {'train_loss', 'val_loss', 'val_iou', 'lr'} <= set(events.Tags()['scalars'])
    assert len(events.Scalars('val_iou')) == 2 and events.Images('samples')[0].width > 400


def test_tensorboard_that_is_not_installed_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    data = draw_set(tmp_path / 'set', count=8)
    with pytest.raises(train_unet.UserError, match='pip install tensorboard'):
        train_unet.train(**TINY, data=str(data), run_dir=str(tmp_path / 'run'), tensorboard=True)


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


def test_a_kernel_that_is_only_imported_shows_no_bars(monkeypatch):
    """As whoever starts a notebook from Python has imported it."""
    monkeypatch.setitem(sys.modules, 'ipykernel', sys)
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    assert train_unet.progress(range(3), 3, 'three').disable


def test_a_module_that_is_loaded_again_says_each_line_once(monkeypatch, capsys):
    """As in a notebook, after CONFIG was edited. A copy of it: the other tests keep the one they have."""
    monkeypatch.setattr(train_unet.log, 'handlers', list(train_unet.log.handlers))
    spec = importlib.util.spec_from_file_location('again', train_unet.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'again', again)                   # where dataclasses look
    spec.loader.exec_module(again)
    again.log.warning('one line')
    assert again.log is train_unet.log and capsys.readouterr().out == 'one line\n'


def test_classes_have_colours_of_their_own():
    colours = train_unet.colour_mask(np.arange(37), 37)
    assert len(np.unique(colours, axis=0)) == 37                       # background and 36 classes


def test_a_loaded_model_predicts_as_the_trained_one_does_in_16_bits(small_set):
    """channels_last, too, is part of how it was trained: 16-bit kernels round otherwise in another layout."""
    result = train_unet.train(data=str(small_set), **{**TINY, 'use_amp': True, 'amp_dtype': 'bfloat16',
                                                      'encoder': 'resnet18', 'image_size': 64, 'num_epochs': 1})
    loaded = train_unet.load(result.run_dir)
    weight = loaded.network.segmentation_head[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    images = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8)
    trained, again = (train_unet.UnderAutocast(model, 'bfloat16')(images) for model in (result.model, loaded))
    assert torch.equal(trained, again)


def test_a_pipeline_is_found_from_another_folder(small_set, tmp_path, monkeypatch):
    import albumentations
    (tmp_path / 'a.json').write_text(json.dumps(albumentations.HorizontalFlip(p=1.0).to_dict()))
    monkeypatch.chdir(tmp_path)
    result = train_unet.train(data=str(small_set), augment='a.json', run_dir=str(tmp_path / 'run'),
                              **{**TINY, 'num_epochs': 1})
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    again = train_unet.train(str(result.run_dir / 'config.py'), run_dir=str(tmp_path / 'again'))
    assert again.history[-1]['train_loss'] == result.history[-1]['train_loss']


def test_a_width_that_the_network_does_not_have_is_told_and_not_claimed(small_set, caplog):
    caplog.set_level('INFO')
    settings = {**TINY, 'architecture': 'FPN', 'num_epochs': 1, 'image_size': 64, 'data': str(small_set)}
    train_unet.train(**settings)
    assert 'decoder_channels: no effect, only Unet, UnetPlusPlus, MAnet have them' in caplog.text
    caplog.clear()
    result = train_unet.train(**{key: value for key, value in settings.items() if key != 'decoder_channels'})
    assert 'decoder_channels' not in caplog.text
    assert train_unet.load(result.run_dir).config['architecture'] == 'FPN'
