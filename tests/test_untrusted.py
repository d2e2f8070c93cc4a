"""Files from strangers: each test carries the real attack, which is refused or harmless.

Images that are broken or huge, odd names, pickled .npy: test_bad_data.py; hostile checkpoints:
test_checkpoints.py; presets with code, secrets: test_config.py.
Run: python -m pytest tests/test_untrusted.py
"""
import json
import lzma
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import PIL.ImageFile
import pytest
import scipy.io
import tifffile
import torch

import train_unet as tu
from conftest import ROOT, TINY, as_words, draw_set

pytestmark = pytest.mark.usefixtures('one_thread')

SETTINGS = {**TINY, 'encoder': 'tu-test_efficientnet', 'num_epochs': 1}
TYPED = as_words(SETTINGS)
CONFIG = dict(tu.CONFIG)


@pytest.fixture
def set_folder(tmp_path):
    return draw_set(tmp_path / 'set', count=8)


@pytest.fixture
def trained(two):
    """What a small run saved as best.pt, and its data."""
    return tu.load_checkpoint(two[0] / 'best.pt'), two[1]


@pytest.fixture
def network_asked(monkeypatch):
    """The names that somebody wanted to look up; that ends the test."""
    asked = []

    def refuse(host, *args, **kwargs):
        asked.append(host)
        pytest.fail(f'{host} is looked up')                            # no except clause takes this
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    return asked


# --- images ---------------------------------------------------------------------------


def chunk(kind, content):
    return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))


def png(width, height, depth=8, *more):
    """A whole and valid black PNG; it shrinks a thousandfold."""
    rows = zlib.compress(bytes((width * depth // 8 + 1) * height))
    header = struct.pack('>IIBBBBB', width, height, depth, 0, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        chunk(*x) for x in ((b'IHDR', header), *more, (b'IDAT', rows), (b'IEND', b'')))


def test_a_real_decompression_bomb_is_refused_before_it_is_decoded(set_folder, capsys, monkeypatch):
    """60 kB that are 400 million pixels: in a data set, and among the images of predict."""
    (set_folder / 'images' / '003.png').write_bytes(png(20_000, 20_000, 1))
    decode = PIL.ImageFile.ImageFile.load
    monkeypatch.setattr(PIL.ImageFile.ImageFile, 'load', lambda self: pytest.fail('it was decoded')
                        if self.width > 10_000 else decode(self))
    assert tu.main(['check', f'data={set_folder}', *TYPED]) == 2
    told = capsys.readouterr().err
    assert '003.png' in told and 'max_image_pixels=400000000' in told
    with pytest.raises(tu.DataError, match='max_image_pixels'):
        tu.read_image(str(set_folder / 'images' / '003.png'), CONFIG)


def mat_bomb(path):
    scipy.io.savemat(path, {'groundtruth': np.zeros((6000, 6000), np.uint8)}, do_compression=True)


def npy_bomb(path):
    """Few pixels, each of 36,000 bands; on the disk it is a hole."""
    text = "{'descr': '|u1', 'fortran_order': False, 'shape': (10, 100, 36000), }\n"
    with open(path, 'wb') as file:
        file.write(b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text)) + text.encode())
        file.truncate(file.tell() + 36_000_000)


def tiff_bomb(path):
    tifffile.imwrite(path, np.zeros((100, 100, 3600), np.uint8), photometric='minisblack',
                     planarconfig='contig', compression='zlib')


@pytest.mark.parametrize('name, write', [
    ('a.mat', mat_bomb), ('a.npy', npy_bomb), ('a.tif', tiff_bomb)])
def test_a_bomb_of_another_format_is_not_decoded(name, write):
    """36 MB at a limit of 100,000 pixels, as 36 GB would be at the usual limit."""
    write(name)
    with pytest.raises(tu.DataError):
        tu.read_image('warm-up' + name[1:], CONFIG)                    # imports the reader
    tracemalloc.start()
    try:
        with pytest.raises(tu.DataError, match=name):
            tu.read_image(name, {**CONFIG, 'max_image_pixels': 100_000})
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize('compression, pack', [(8, lambda content: zlib.compress(content, 9)),
                                               (34925, lambda content: lzma.compress(content, preset=0))],
                         ids=['Deflate', 'LZMA'])
def test_a_strip_that_explodes_is_refused_before_it_is_unpacked(tmp_path, compression, pack):
    """8 x 8 pixels of 5 bands in one strip, which unpacks to 60 MB."""
    path = tmp_path / 'bomb.tif'
    tifffile.imwrite(path, np.zeros((8, 8, 5), np.uint8), compression='zlib', photometric='minisblack',
                     planarconfig='contig', rowsperstrip=8)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        kind, place, size = (page.tags[code].valueoffset for code in (259, 273, 279))
    bomb = pack(bytes(6 * 10**7))
    content = bytearray(path.read_bytes())
    content[kind:kind + 2] = struct.pack('<H', compression)
    for at, value in ((place, len(content)), (size, len(bomb))):
        content[at:at + 4] = struct.pack('<I', value)
    path.write_bytes(bytes(content) + bomb)
    tracemalloc.start()
    with pytest.raises(tu.DataError, match='unpacks to more than its 320 bytes'):
        tu.read_image(path, CONFIG | {'in_channels': 5})
    assert tracemalloc.get_traced_memory()[1] < 5 * 10**7
    tracemalloc.stop()


@pytest.mark.parametrize('compression, told', [
    (34925, 'cannot be read: '),                                       # LZMA, damaged
    pytest.param(50000, 'pip install imagecodecs',                     # Zstandard, which Python has from 3.14 on
                 marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason='Python unpacks it'))])
def test_a_tiff_that_cannot_be_unpacked_is_named(tmp_path, compression, told):
    """lzma.LZMAError and ModuleNotFoundError are none of the errors that damaged files raise else."""
    path = tmp_path / 'x.tif'
    tifffile.imwrite(path, np.zeros((8, 8, 5), np.uint8), compression='zlib', photometric='minisblack')
    with tifffile.TiffFile(path) as file:
        kind = file.pages[0].tags[259].valueoffset
    content = bytearray(path.read_bytes())
    content[kind:kind + 2] = struct.pack('<H', compression)
    path.write_bytes(content)
    with pytest.raises(tu.DataError, match=f'x.tif: cannot be read: .*{told}' if 'pip' in told else f'x.tif: {told}'):
        tu.read_image(str(path), CONFIG | {'in_channels': 5})


def test_a_tile_larger_than_its_image_is_refused(tmp_path):
    tifffile.imwrite(tmp_path / 'x.tif', np.zeros((16, 16, 3), np.uint8), tile=(4096, 4096), compression='zlib',
                     photometric='rgb')
    with pytest.raises(tu.DataError, match='above max_image_pixels'):
        tu.read_image(str(tmp_path / 'x.tif'), {**tu.CONFIG, 'max_image_pixels': 100_000})


@pytest.mark.parametrize('order', [b'MI', b'XX'])                       # scipy takes all but IM for it
def test_a_matlab_bomb_of_the_other_byte_order_is_refused(tmp_path, order):
    content = zlib.compress(bytes(40_000_000))
    (tmp_path / 'x.mat').write_bytes(bytes(126) + order + struct.pack('>II', 15, len(content)) + content)
    with pytest.raises(tu.DataError, match='unpacks to more than'):
        tu.read_mask(str(tmp_path / 'x.mat'), {**tu.CONFIG, 'max_image_pixels': 100_000})


def test_a_hole_in_a_matlab_file_is_not_walked_through(tmp_path, monkeypatch):
    """MATLAB's 7.3 is HDF5: its zeros were taken for elements, eight bytes at a time."""
    asked, real = [], struct.unpack
    monkeypatch.setattr(struct, 'unpack', lambda *words: asked.append(words) or real(*words))
    with open(tmp_path / 'x.mat', 'wb') as file:
        file.write(b'MATLAB 7.3 MAT-file'.ljust(124) + b'\0\2IM')
        file.truncate(10**7)
    with pytest.raises(tu.DataError, match='is of MATLAB 7.3; save it with -v7'):
        tu.read_mask(str(tmp_path / 'x.mat'), tu.CONFIG)
    assert len(asked) < 10


def test_a_matlab_element_that_is_not_compressed_is_not_read_twice(tmp_path):
    scipy.io.savemat(tmp_path / 'x.mat', {'groundtruth': np.eye(2000)})
    tracemalloc.start()
    tu.check_compressed(tmp_path / 'x.mat', 10**9)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_matlab_bomb_behind_an_element_that_is_not_compressed_is_refused_before_it_is_unpacked(tmp_path):
    content, plain = zlib.compress(bytes(40_000_000)), struct.pack('<II', 14, 64) + bytes(64)
    bomb = struct.pack('<II', 15, len(content)) + content
    (tmp_path / 'x.mat').write_bytes(bytes(126) + b'IM' + plain + bomb)
    tracemalloc.start()
    with pytest.raises(tu.DataError, match='unpacks to more than'):
        tu.check_compressed(tmp_path / 'x.mat', 800_000)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_a_page_that_names_itself_as_the_next_one_is_not_followed(tmp_path):
    """It was, for ever."""
    tifffile.imwrite(tmp_path / 'x.tif', np.full((8, 8), 7, np.uint8))
    content = bytearray((tmp_path / 'x.tif').read_bytes())
    start, = struct.unpack('<I', content[4:8])
    following = start + 2 + 12 * struct.unpack('<H', content[start:start + 2])[0]
    content[following:following + 4] = content[4:8]
    (tmp_path / 'x.tif').write_bytes(content)
    command = f'import train_unet as tu; print(tu.read_mask("{tmp_path}/x.tif", tu.CONFIG).max())'
    done = subprocess.run([sys.executable, '-c', command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == '7\n' or 'DataError' in done.stderr


def test_a_text_in_a_picture_that_explodes_is_refused():
    Path('a.png').write_bytes(png(8, 8, 8, (b'zTXt', b'a\0\0' + zlib.compress(bytes(10 ** 7)))))
    with pytest.raises(tu.DataError, match='a.png'):
        tu.read_image('a.png', CONFIG)


@pytest.mark.parametrize('head', [b'%!PS-Adobe-3.0 EPSF-3.0\n', b'%!PS-Adobe-3.0\n'])
def test_a_picture_that_is_a_program_is_not_run(head, monkeypatch):
    """PostScript under the name of a PNG: Pillow would hand it to Ghostscript."""
    Path('bin').mkdir()
    Path('bin/gs').write_text(f'#!/bin/sh\ntouch {os.getcwd()}/executed\n')
    Path('bin/gs').chmod(0o755)
    monkeypatch.setenv('PATH', f'{os.getcwd()}/bin:{os.environ["PATH"]}')
    import PIL.EpsImagePlugin
    monkeypatch.setattr(PIL.EpsImagePlugin, 'gs_binary', None)         # look for it again
    program = b'%%BoundingBox: 0 0 16 12\n%%EndComments\n(%pipe%touch executed) (w) file\nshowpage\n'
    Path('a.png').write_bytes(head + program)
    for read in (tu.read_image, tu.read_mask):
        with pytest.raises(tu.DataError, match='a.png'):
            read('a.png', CONFIG)
    assert not os.path.exists('executed')


def test_a_pipe_in_a_data_set_is_not_waited_for(set_folder, make_pipe):
    make_pipe(set_folder / 'images' / 'x.npy')
    shutil.copy(next((set_folder / 'masks').iterdir()), set_folder / 'masks' / 'x.png')
    with pytest.raises(tu.DataError, match='x.npy: cannot be read: is no file'):
        tu.inspect_data({**tu.CONFIG, 'data': str(set_folder)})


# --- augmentation files ---------------------------------------------------------------


def pipeline(name, **arguments):
    return json.dumps({'__version__': '2.0.8', 'transform': {'__class_fullname__': name, 'p': 1.0, **arguments}})


LAUGHS = '\n'.join(['a: &a0 [x, x, x, x, x, x, x, x, x, x]'] + [
    f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 10)}]' for i in range(1, 10)])


@pytest.mark.parametrize('name, text', [
    ('a.json', pipeline('os.system', command='touch harmed')),
    ('a.json', pipeline('posix.system', command='touch harmed')),
    ('a.json', pipeline('subprocess.Popen', args=['touch', 'harmed'])),
    ('a.json', pipeline('pathlib.Path', args=['harmed'])),
    ('a.json', pipeline('torch.nn.Linear', in_features=3, out_features=3)),
    ('a.json', pipeline('Lambda', image='os.system')),
    ('a.json', pipeline('Compose', transforms=[
        {'__class_fullname__': 'os.system', 'command': 'touch harmed'}])),
    ('a.yaml', '!!python/object/apply:os.system ["touch harmed"]'),
    ('a.yaml', 'transform: !!python/object/apply:os.system ["touch harmed"]'),
    ('a.yaml', '!!python/object/new:os.system ["touch harmed"]'),
    ('a.yaml', LAUGHS), ('a.yaml', '[' * 1000), ('a.json', '[' * 100_000), ('a.json', 'null'),
    ('a.json', '{"transform": 5}'), ('a.json', b'\xff\xfe'), ('a.json', ''),
], ids=lambda x: str(x)[:60])
def test_an_augmentation_file_that_asks_for_anything_else_is_refused(set_folder, name, text, capsys):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert tu.main([f'data={set_folder}', *TYPED, f'augment={name}']) == 2
    assert f"augment='{name}'" in capsys.readouterr().err and not os.path.exists('harmed')


# --- names and values -----------------------------------------------------------------


NASTY = ['one\n  two', '\x1b[31mred\x1b]0;title\x07', '$(touch harmed)', '`touch harmed`', '; touch harmed;',
         'a..', '-o', '--help', 'a=b', "it's", '"quoted"', 'a b', '%s{stem}']


@pytest.mark.parametrize('given', ['folder', 'files'])
def test_predictions_of_odd_names_stay_in_their_folder(trained, given, capsys):
    """And nothing that a terminal would obey is printed; a broken one of each name is told."""
    tu.save_checkpoint(Path('best.pt'), trained[0])
    Path('in/deep').mkdir(parents=True)
    picture = (trained[1] / 'images' / '000.png').read_bytes()
    for name in NASTY:
        Path('in', f'{name}.png').write_bytes(picture)
        Path('in/deep', f'{name}.png').write_bytes(b'broken')
    before = {path for path in Path().rglob('*')}
    inputs = ['in'] if given == 'folder' else sorted(map(str, Path('in').rglob('*.png')))
    assert tu.predict('best.pt', inputs, 'here/out') == 1
    made = {path for path in Path().rglob('*')} - before - {Path('here')}
    names = {path.name.replace('.png.png', '.png') for path in made}   # a broken one has its name
    assert names == {'out'} | {f'{name}.png' for name in NASTY}
    assert all(path.is_relative_to('here/out') for path in made)
    printed = capsys.readouterr()
    assert 'could not be predicted' in printed.err
    assert all(c.isprintable() or c == '\n' for c in printed.out + printed.err)


@pytest.mark.parametrize('line', [
    '/etc/passwd,/etc/passwd', '../../../../../../etc/passwd,/etc/passwd', '/dev/zero,/dev/zero',
    '/dev/stdin,/dev/stdin', '$(touch harmed),`touch harmed`', '"a\n\x1b[31mb",c', '~/x,~/x', 'set,set',
    '|touch harmed,x', 'file:///etc/passwd,x', 'http://example.com/a.png,http://example.com/b.png'])
def test_a_list_that_points_elsewhere_shows_nothing_of_it(set_folder, line, capsys, network_asked):
    good = ''.join(f'set/images/{n:03d}.png,set/masks/{n:03d}.png\n' for n in range(8))
    Path('list.csv').write_text(f'image,mask\n{good}{line}\n')
    assert tu.main(['check', 'data=list.csv', *TYPED]) == 2
    told = capsys.readouterr().err
    assert 'root' not in told and not os.path.exists('harmed') and not network_asked
    assert all(c.isprintable() or c == '\n' for c in told)


@pytest.mark.parametrize('name', [
    '$(touch harmed)', '`touch harmed`', '";touch harmed;"', "';touch harmed;'"])
def test_a_line_to_type_runs_nothing_but_what_it_says(tmp_path, name):
    """The folders of a data set are in the advice; a real shell reads it."""
    folder = draw_set(tmp_path / 'set', count=2)
    shutil.copytree(folder / 'images', folder / 'B')
    (folder / 'images').rename(folder / name)
    with pytest.raises(tu.DataError) as caught:
        tu.find_pairs({**CONFIG, 'data': str(folder)})
    lines = re.findall(r'^ +(images=.*)   \(', str(caught.value), re.MULTILINE)
    assert lines
    for typed in lines:
        subprocess.run(['bash', '-c', f'printf "%s\\n" {typed}'], capture_output=True)
    assert not os.path.exists('harmed')


def test_names_of_folders_do_not_command_the_terminal(trained, tmp_path, capsys):
    odd = Path('run\x1b]0;title\x07')
    tu.save_checkpoint(odd / 'best.pt', trained[0])
    assert tu.main(['evaluate', str(odd)]) == 0
    assert tu.main(['predict', str(odd), str(trained[1] / 'images' / '000.png'), '-o', 'masks\x1b[2J']) == 0
    printed = capsys.readouterr()
    assert 'Written to' in printed.out and '\x1b' not in printed.out + printed.err


def test_class_names_of_a_stranger_do_not_command_the_terminal(trained, capsys):
    names = ['\x1b]0;title\x07', 'a\nb']
    config = trained[0]['config'] | {'class_names': names}
    tu.save_checkpoint(Path('run/best.pt'), trained[0] | {'config': config})
    assert tu.main(['evaluate', 'run']) == 0
    printed = capsys.readouterr()
    assert 'title' in printed.out and '\x1b' not in printed.out + printed.err


def test_values_of_any_size_are_shown_in_few_letters():
    nested = list(range(10))
    for _ in range(7):
        nested = [nested] * 10                                         # ten million numbers, if all were told
    tracemalloc.start()
    assert len(tu.shown(nested)) <= 210
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert tu.shown({255: 1, '#ff0000': 2}) == "{255: 1, '#ff0000': 2}"


# --- checkpoints and run folders of others --------------------------------------------


def test_code_in_the_config_of_a_run_folder_is_never_executed(trained, capsys):
    tu.save_checkpoint(Path('run/last.pt'), trained[0])
    Path('run/config.py').write_text("import os\nos.mkdir('harmed')\nconfig = {}\n")
    assert tu.main(['resume=run']) == 2 and tu.main(['resume=auto', 'run_dir=run']) == 2
    assert tu.main(['--preset', 'run/config.py']) == 2 and tu.main(['--preset', 'run']) == 2
    assert capsys.readouterr().err.count('read, not executed') == 2 and not os.path.exists('harmed')


@pytest.mark.parametrize('change', [{'val_fraction': 'x'}, {'group_pattern': '('}, {'data': 5}], ids=str)
def test_settings_of_last_pt_that_make_no_sense_are_not_used(trained, change):
    tu.save_checkpoint(Path('run/best.pt'), trained[0])
    tu.save_checkpoint(Path('run/last.pt'), trained[0] | {'config': trained[0]['config'] | change})
    assert tu.main(['evaluate', 'run']) == 0


def test_a_link_in_a_run_folder_is_not_written_through(trained, set_folder, tmp_path):
    (tmp_path / 'project').mkdir()
    (tmp_path / 'project' / 'metrics.json').write_text('{}')
    tu.save_checkpoint(Path('run/best.pt'), trained[0])
    os.symlink(tmp_path / 'project', f'run/evaluation_{set_folder.name}')
    assert tu.main(['evaluate', 'run', f'data={set_folder}']) == 0
    assert os.listdir(tmp_path / 'project') == ['metrics.json']
    assert Path(f'run/evaluation_{set_folder.name}-2/metrics.json').exists()


@pytest.mark.parametrize('change', [
    {'threshold': 'x'}, {'weights': {}}, {'weights': []},
    {'weights': {'network.x': 1}}, {'config': []}, {'config': {'architecture': 5}},
    {'config': {'image_size': 'x'}}, {'config': {'image_size': [10 ** 6, 10 ** 6]}},
    {'config': {'image_size': 'auto'}},
    {'config': {'mean': 'x'}}, {'config': {'num_classes': 10 ** 9}},
    {'config': {'keep_float32': '__class__'}}, {'config': {'architecture': 'from_pretrained'}}], ids=str)
def test_a_model_file_that_makes_no_sense_ends_with_2_and_no_traceback(trained, change, capsys):
    if isinstance(change.get('config'), dict):
        change = {'config': trained[0]['config'] | change['config']}
    tu.save_checkpoint(Path('best.pt'), trained[0] | change)
    assert tu.main(['predict', 'best.pt', str(trained[1] / 'images' / '000.png')]) == 2
    assert 'Traceback' not in capsys.readouterr().err


def test_a_threshold_that_is_no_number_makes_no_model(trained, tmp_path):
    tu.save_checkpoint(tmp_path / 'best.pt', trained[0] | {'threshold': float('nan')})
    with pytest.raises(tu.UserError, match='threshold'):
        tu.load(tmp_path / 'best.pt')


def test_an_image_size_beyond_all_images_is_refused_by_its_name(trained):
    tu.save_checkpoint(Path('best.pt'), trained[0] | {'config': trained[0]['config'] | {'image_size': [65536, 65536]}})
    with pytest.raises(tu.UserError, match=r'image_size \[65536, 65536\]'):
        tu.load('best.pt')


# --- the network ----------------------------------------------------------------------


def test_nothing_asks_for_the_network(set_folder, tmp_path):
    """The real command, without the settings that tests use to keep libraries quiet, as in a cell of a notebook."""
    (tmp_path / 'watch').mkdir()
    (tmp_path / 'watch' / 'sitecustomize.py').write_text(
        'import socket\n'
        'def refuse(*args, **kwargs):\n'
        '    open("asked", "a").write(repr(args))\n'
        '    raise OSError("no network")\n'
        'real = socket.socket.connect\n'
        'socket.getaddrinfo = socket.gethostbyname = refuse\n'
        'socket.socket.connect = lambda own, address: '
        'real(own, address) if isinstance(address, (str, bytes)) else refuse(address)\n')
    quiet = ('NO_ALBUMENTATIONS_UPDATE', 'HF_HUB_OFFLINE')
    env = {key: value for key, value in os.environ.items() if key not in quiet}
    done = subprocess.run([sys.executable, ROOT / 'train_unet.py', f'data={set_folder}', *TYPED],
                          env={**env, 'PYTHONPATH': str(tmp_path / 'watch'), 'OMP_NUM_THREADS': '1',
                               'MPLBACKEND': 'of_the_notebook'}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and 'pictures could not be written' not in done.stdout, done.stderr
    assert not os.path.exists('asked'), Path('asked').read_text()


@pytest.mark.parametrize('encoder', [
    'tu-hf-hub:stranger/network', 'tu-hf_hub:stranger/network', 'tu-local-dir:/tmp', 'tu-https://example.com/x'])
def test_a_model_of_a_stranger_does_not_reach_for_the_network(trained, encoder, network_asked, capsys):
    saved = trained[0] | {'config': trained[0]['config'] | {'encoder': encoder}}
    tu.save_checkpoint(Path('best.pt'), saved)
    assert tu.main(['predict', 'best.pt', str(trained[1])]) == 2
    assert not network_asked


def test_a_replay_of_a_strangers_batch_does_not_reach_for_the_network(trained, tmp_path, network_asked):
    config = trained[0]['config'] | {'encoder': 'tu-hf-hub:stranger/network'}
    tu.save_checkpoint(tmp_path / 'bad_batch.pt', trained[0] | {'config': config, 'window': [], 'dtype': 'float32'})
    with pytest.raises(tu.UserError, match='has not the right form'):
        tu.replay(tmp_path / 'bad_batch.pt')
    assert not network_asked


def test_weights_that_are_there_are_not_fetched(trained, network_asked):
    saved = trained[0] | {'config': trained[0]['config'] | {'encoder_weights': 'imagenet'}}
    tu.save_checkpoint(Path('best.pt'), saved)
    tu.load('best.pt')
    assert not network_asked


# --- secrets --------------------------------------------------------------------------


@pytest.mark.parametrize('key', ['wandb_token', 'slack_webhook', 'api_key'])
def test_a_secret_in_a_preset_is_refused_and_saved_nowhere(set_folder, key, capsys):
    Path('mine.py').write_text(f"config = {{'{key}': 'hunter2'}}\n")
    assert tu.main([f'data={set_folder}', '--preset', 'mine.py', *TYPED]) == 2
    told = capsys.readouterr()
    assert f'unknown key {key!r}: no secret is kept here' in told.err and 'hunter2' not in told.err + told.out
    assert not os.path.exists('runs')


def test_links_under_temporary_names_in_a_run_folder_are_not_written_through(own, tmp_path):
    (tmp_path / 'profile').write_text('mine')
    for name in ('metrics.json', 'best.new'):
        os.symlink(tmp_path / 'profile', own / f'.{name}.{os.getpid()}.tmp')
    assert tu.main(['evaluate', str(own)]) == 0
    assert (tmp_path / 'profile').read_text() == 'mine' and not (own / 'metrics.json').is_symlink()


def test_a_lock_that_is_a_link_is_not_followed(own, tmp_path, monkeypatch, caplog):
    """filelock before 3.20.1 empties the file that it leads to."""
    (tmp_path / 'profile').write_text('mine')
    (own / '.lock').unlink(missing_ok=True)
    os.symlink(tmp_path / 'profile', own / '.lock')
    model = tu.load(own)
    monkeypatch.setattr('filelock.FileLock', lambda *_, **__: pytest.fail('it is followed'))
    assert not tu.store_threshold(own, 0.7, model) and '.lock is a link' in caplog.text


def test_a_setting_that_unpacks_to_no_end_is_refused(trained):
    """Four bytes as a tensor of a quintillion numbers, of which a list would be made."""
    config = trained[0]['config'] | {'mean': torch.zeros(1).expand(10 ** 18)}
    tu.save_checkpoint(Path('best.pt'), trained[0] | {'config': config})
    with pytest.raises(tu.UserError, match='no checkpoint of this program'):
        tu.load('best.pt')


def test_an_augmentation_file_that_explodes_is_not_built(set_folder, monkeypatch, capsys):
    """A kilobyte that names ten billion transforms."""
    levels = ['a0: &a0 {__class_fullname__: HorizontalFlip, p: 0.5}'] + [
        f'a{n}: &a{n} {{__class_fullname__: OneOf, p: 0.5, transforms: [{", ".join([f"*a{n - 1}"] * 10)}]}}'
        for n in range(1, 11)]
    Path('a.yaml').write_text('\n'.join([*levels, 'transform: *a10']))
    monkeypatch.setattr('albumentations.from_dict', lambda *_: pytest.fail('it is built'))
    assert tu.main([f'data={set_folder}', *TYPED, 'augment=a.yaml']) == 2
    assert 'one inside the other' in capsys.readouterr().err


@pytest.mark.parametrize('kind', ['deep', 'pipe'])
def test_scores_of_a_stranger_are_neither_believed_nor_waited_for(own, set_folder, kind, make_pipe):
    path = own / f'evaluation_{set_folder.name}' / 'metrics.json'
    path.parent.mkdir()
    make_pipe(path) if kind == 'pipe' else path.write_text('[' * 10 ** 6)
    assert tu.main(['evaluate', str(own), f'data={set_folder}']) == 0
    assert json.loads(path.read_text())['metrics']
