"""Config: settings as they are typed, presets, overrides, validation, and how problems are told.

Run: python -m pytest tests/test_config.py
"""
import ast
import builtins
import io
import os
import re
import runpy
import sys
import tokenize

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import train_unet
from conftest import ROOT, start_script
from helpers import PRESETS, dataset
from train_unet import CONFIG, FOREIGN, SHORT_NAMES, ConfigError, load_preset, parse_command, parse_overrides
from train_unet import parse_value, resolve_config


def resolved(preset=None, **overrides):
    return resolve_config(preset, overrides)[0]


def problems_of(preset=None, **overrides):
    with pytest.raises(ConfigError) as caught:
        resolve_config(preset, overrides)
    return caught.value.problems


def write_preset(text, name='mine.py'):
    """Write a preset into the working folder, which conftest makes a temporary one."""
    with open(name, 'w', encoding='utf-8') as file:
        file.write(text)
    return name


# --- what is typed: values, keys, flags -----------------------------------------------


@pytest.mark.parametrize('text, value', [
    ('8', 8), ('1e-3', 0.001), ('512x384', [512, 384]), ('512X384', [512, 384]),
    ('16*32', '16*32'), ('none', None), ('None', None),
    ('null', None), ('true', True), ('False', False), ('[1, 2]', [1, 2]), ('(1, 2)', (1, 2)),
    ('{255: 1}', {255: 1}), ('data/set', 'data/set'), ('16-mixed', '16-mixed'), ('', ''),
    ('[' * 300, '[' * 300), ('__import__("os")', '__import__("os")'),
])
def test_typed_values(text, value):
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize('words, overrides', [
    (['num_epochs=5'], {'num_epochs': 5}),
    (['--epochs', '5'], {'num_epochs': 5}),
    (['--batch-size', '4'], {'batch_size': 4}),
    (['--lr=1e-3'], {'learning_rate': 0.001}),
    (['--ignore-index', '-1'], {'ignore_index': -1}),
    (['--deterministic'], {'deterministic': True}),
    (['--deterministic', '--lr', '1'], {'deterministic': True, 'learning_rate': 1}),
    (['--deterministic', 'data=x'], {'deterministic': True, 'data': 'x'}),
    (['--no-channels-last', '--lr', '1'], {'channels_last': False, 'learning_rate': 1}),
    (['--no-amp'], {'amp': False}),
    (['data=s3://a?b=c'], {'data': 's3://a?b=c'}),
])
def test_typed_overrides(words, overrides):
    assert parse_overrides(words) == (overrides, [])


@pytest.mark.parametrize('words, overrides', [
    (['--fp16', 'data=x'], {'fp16': True, 'data': 'x'}),
    (['--amp', '--lr', '1'], {'amp': True, 'learning_rate': 1}),
    (['--mixed-precision', 'bf16', 'data=x'], {'mixed_precision': 'bf16', 'data': 'x'}),
])
def test_flags_of_other_trainers_do_not_swallow_the_next_word(words, overrides):
    assert parse_overrides(words) == (overrides, [])


@pytest.mark.parametrize('text', ['[background,nucleus]', 'background,nucleus', '["background", "nucleus"]'])
def test_a_list_of_names_needs_no_quotes(text):
    overrides, others = parse_overrides([f'class_names={text}'])
    assert resolve_config(None, overrides)[0]['class_names'] == ['background', 'nucleus'] and not others


@pytest.mark.parametrize('key, text', [
    ('run_dir', '2024_01_15'), ('data', '1e3'), ('images', '512x512'), ('masks', '1.10'),
])
def test_names_keep_their_spelling(key, text):
    assert resolved(**parse_command([f'{key}={text}']).overrides)[key] == text


@pytest.mark.parametrize('key, text, number', [('max_image_pixels', '2e8', 200_000_000), ('num_epochs', '5.0', 5)])
def test_a_whole_number_may_be_written_as_another_one(key, text, number):
    value = resolved(**parse_command([f'{key}={text}']).overrides)[key]
    assert value == number and type(value) is int


@pytest.mark.parametrize('alias', SHORT_NAMES)
def test_short_names_reach_their_key(alias):
    value = {'compile': True, 'arch': 'FPN', 'out': 'there', 'o': 'there', 'lr': 0.5, 'wd': 0.5}.get(alias, 16)
    assert resolved(**{alias: value})[SHORT_NAMES[alias]] == ([16, 16] if alias == 'size' else value)


def test_words_that_are_no_settings_stay_apart():
    open('a=b', 'w').close()
    assert parse_overrides(['photo.jpg', 'runs/x=1/y', 'a=b']) == ({}, ['photo.jpg', 'runs/x=1/y',
                                                                       'a=b'])


def test_what_is_typed_last_counts():
    overrides, _ = parse_overrides(['epochs=5', 'num_epochs=7', 'epochs=9'])
    assert resolve_config(None, overrides)[0]['num_epochs'] == 9


def test_one_setting_under_two_names_is_refused_but_typed_last_stands(tmp_path):
    assert 'num_epochs=1: num_epochs is there too, under another name; keep one' in \
        problems_of(epochs=2, num_epochs=1)[0]
    (tmp_path / 'p.py').write_text("config = {'num_epochs': 1, 'epochs': 2}")
    with pytest.raises(ConfigError, match='epochs=2: num_epochs is there too'):
        resolve_config(str(tmp_path / 'p.py'))
    assert parse_command(['epochs=2', 'num_epochs=1', '--epochs', '3']).overrides == {'num_epochs': 3}


# --- what is typed: commands ----------------------------------------------------------


def test_a_command_keeps_verb_paths_output_and_preset():
    command = parse_command(['predict', 'runs/x', 'a.jpg', '-o', 'masks'])
    assert (command.verb, command.paths, command.output) == ('predict', ['runs/x', 'a.jpg'], 'masks')
    assert parse_command(['predict', 'runs/x', 'a.jpg', '--out', 'masks']).output == 'masks'
    assert parse_command(['check', '--preset', 'fast']).preset == 'fast'
    assert parse_command(['data=demo', '-o', 'there']).overrides == {'data': 'demo', 'run_dir': 'there'}


def test_a_flag_of_predict_leaves_the_images_alone():
    command = parse_command(['predict', 'runs/x', '--tta', 'photo.jpg'])
    assert (command.paths, command.own) == (['runs/x', 'photo.jpg'], {'tta': True})


@pytest.mark.parametrize('words', [['predict', 'r', 'x.png', 'tta=no'], ['export', 'r', 'half=maybe']])
def test_switches_are_true_or_false(words):
    with pytest.raises(ConfigError, match='must be True or False'):
        parse_command(words)


@pytest.mark.parametrize('words, told', [
    (['predict', 'runs/x', 'a.jpg', '--preset', 'fast'], "preset='fast': predict has no use for it"),
    (['evaluate', 'runs/x', 'other'], "type data=other"),
    (['export', 'runs/x', 'runs/y'], "'runs/y': export takes one run"),
    (['export', 'runs/x', 'image_size=64'], 'image_size=64: export has no use for it'),
    (['evaluate', 'runs/x', 'num_epochs=3'], 'num_epochs=3: evaluate has no use for it'),
    (['evaluate', 'runs/x', 'oversample_foreground=0'], 'oversample_foreground=0: evaluate has no use for it'),
    (['predict', 'runs/x', 'a.jpg', 'init_scale=3'], 'init_scale=3: predict has no use for it'),
    (['predict', 'runs/x', 'a.jpg', 'lr=3'], 'learning_rate=3: predict has no use for it'),
    (['evaluate', 'runs/x', 'run_dir=there'], "run_dir='there': evaluate has no use for it"),
    (['evaluate', 'runs/x', '-o', 'there'], "run_dir='there': evaluate has no use for it"),
    (['evaluate', 'runs/x', 'deterministic=True'], 'deterministic=True: evaluate has no use for it'),
    (['predict', 'runs/x', 'a.jpg', 'mask_values=>127'], "mask_values='>127': predict has no use for it"),
    (['predict', 'runs/x', 'a.jpg', '-o'], "'-o' is no command and no key=value; type o=VALUE"),
    (['predict', 'runs/x', 'a.jpg', '-omasks'], "'-omasks' is no command and no key=value"),
])
def test_words_that_would_be_swallowed_are_problems(words, told):
    with pytest.raises(ConfigError) as error:
        parse_command(words)
    assert told in str(error.value)


def test_a_run_after_an_unknown_command_is_told_with_the_commands_it_may_stand_after(tmp_path):
    (tmp_path / 'config.py').touch()
    with pytest.raises(ConfigError, match=f'resume={tmp_path}, or evaluate, predict or export before it'):
        parse_command(['infer', str(tmp_path)])


@pytest.mark.parametrize('words, told', [
    (['tune', 'runs/x'], "'runs/x' is no command and no key=value; type preset=runs/x"),
    (['tune', 'runs/x/best.pt'], '; type preset=runs/x'),
    (['check', 'runs/x'], "'runs/x' is no command and no key=value; type resume=runs/x"),
    (['runs/x/best.pt'], "type resume=runs/x/best.pt, or evaluate, predict or export before it"),
    (['demo/'], '; type data=demo/'), (['predict', 'runs/x', 'a.png', '--save'], '; type save=VALUE'),
    (['a photo.PNG'], ' predict RUN "a photo.PNG" finds its mask'), (['list.csv'], '; type data=list.csv')])
def test_a_path_alone_is_told_with_what_takes_it(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs('runs/x')
    os.makedirs('demo')
    for name in ('runs/x/config.py', 'runs/x/best.pt', 'a photo.PNG', 'list.csv'):
        open(name, 'w').close()
    with pytest.raises(ConfigError) as error:
        parse_command(words)
    assert error.value.problems[0].endswith(told)


@pytest.mark.parametrize('words', [['data=demo', '-o'], ['--preset='], ['preset=0']])
def test_nothing_typed_is_dropped_in_silence(words):
    with pytest.raises(ConfigError):
        parse_command(words)


@pytest.mark.parametrize('words', [['evaluate', 'runs/x', '--foo'], ['export', 'runs/x', '--onnx']])
def test_an_unknown_option_is_not_taken_for_data_or_a_format(words):
    with pytest.raises(ConfigError) as caught:
        parse_command(words)
    [problem] = caught.value.problems
    assert problem.startswith(f"'{words[2]}' is no command and no key=value")


def test_a_name_that_is_missing_is_told():
    with pytest.raises(ConfigError, match='--run-dir'):
        parse_command(['--run-dir', '--epochs', '3'])


@pytest.mark.parametrize('word, told', [('epochs', 'type epochs=VALUE'), ('--data', 'type data=VALUE'),
                                        ('epoch', "did you mean 'epochs'?"), ('zzzz', 'type KEY=VALUE'),
                                        ('--lr', 'type lr=VALUE'), ('--num-workers', 'type num_workers=VALUE'),
                                        ('--preset', 'type preset=VALUE'), ('--image-size', 'type image_size=VALUE')])
def test_a_word_without_a_value_gets_what_to_type_instead(word, told):
    with pytest.raises(ConfigError) as error:
        train_unet.parse_command([word])
    assert told in str(error.value)


@pytest.mark.parametrize('words, advice', [
    (['data=x', 'check'], 'the command comes first'), (['configs/fast.py'], 'preset=configs/fast.py'),
    (['RUN'], 'resume='), (['export', 'RUN', 'onnx'], 'type format=onnx'), (['grad_clip=0'], 'or None'),
    (['predict', 'photos', 'RUN'], ' photos'), (['evaluate', 'a set', 'RUN'], ' data="a set"'),
    (['export', 'pt2', 'RUN'], ' format=pt2'),
    (['mask_values={255:', '1}'], 'mask_values="{255: 1}", with the quotes')])
def test_words_in_the_wrong_place_are_told_what_they_should_be(tmp_path, monkeypatch, words, advice):
    (tmp_path / 'config.py').touch()
    monkeypatch.chdir(ROOT)
    with pytest.raises(train_unet.ConfigError) as caught:
        train_unet.parse_command([str(tmp_path) if word == 'RUN' else word for word in words])
    assert advice in str(caught.value)
    if words[-1] == 'RUN' != words[0]:
        line = f"{words[1]!r}: the run comes first: python train_unet.py {words[0]} {tmp_path}{advice}"
        assert line in str(caught.value) and 'takes one run' not in str(caught.value)


# --- defaults, preset, overrides ------------------------------------------------------


def test_the_defaults_are_valid():
    assert resolved() == CONFIG


def test_later_layers_win():
    path = write_preset("config = {'batch_size': 2, 'epochs': 7}")
    config, sources, _ = resolve_config(path, {'num_epochs': 9})
    keys = ('batch_size', 'num_epochs', 'seed')
    assert [config[k] for k in keys] == [2, 9, CONFIG['seed']]
    assert [sources[k] for k in keys] == [f"preset '{path}'", 'you', 'default']


def test_merging_leaves_the_defaults_alone():
    before = dict(CONFIG)
    resolved(num_epochs=5, image_size=(64, 64))
    assert CONFIG == before


def test_of_two_presets_the_last_counts():
    assert parse_command(['--preset', 'stable', '--preset=fast']).preset == 'fast'


# --- presets --------------------------------------------------------------------------


@pytest.mark.parametrize('path', PRESETS, ids=lambda p: p.stem)
def test_shipped_preset_holds_only_known_keys_and_valid_values(path):
    assert load_preset(path.stem) and set(load_preset(path.stem)) <= set(CONFIG)
    assert resolved(path.stem) == resolved(**load_preset(path.stem)) != CONFIG


@pytest.mark.parametrize('path', PRESETS, ids=lambda p: p.stem)
def test_shipped_preset_imports_as_a_module_too(path):
    assert runpy.run_path(str(path))['config'] == load_preset(path)


@pytest.mark.parametrize('text', [
    "config = {'lr': __import__('os').mkdir('ran')}",
    "import os\nos.mkdir('ran')\nconfig = {}",
    "config = {'lr': 1}\nimport os\nos.mkdir('ran')",
    "config = {k: __import__('os').mkdir('ran') for k in 'a'}",
    "config = dict(lr=__import__('os').mkdir('ran'))",
    "config = {'data': f'{__import__(\"os\").mkdir(\"ran\")}'}",
    "if __import__('os').mkdir('ran') is None:\n    config = {}",
    "def config():\n    pass",
    "config = other = {}",
    "config = {'lr': 1}\nconfig = {'lr': 2}",
    "config = 5",
    "config = {'a': 1",
    "config = {'a': '\0'}",
    "config = {'lr': %s1}" % ('-' * 3000),
    "'only a docstring'",
])
def test_a_preset_with_more_than_one_literal_dict_is_refused_unexecuted(text):
    with pytest.raises(ConfigError):
        load_preset(write_preset(text))
    assert not os.path.exists('ran')


@pytest.mark.parametrize('name', ['nowhere', 'nowhere.py', '', 'a\0b', 'x' * 5000, '.py', True])
def test_a_preset_that_is_not_there_is_a_config_error(name):
    with pytest.raises(ConfigError):
        load_preset(name)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """Of which Python would keep the last, in silence."""
    preset = tmp_path / 'mine.py'
    preset.write_text("config = {'batch_size': 4, 'seed': 1, 'mask_values': {'4': 1, '5': 1}, 'batch_size': 8}")
    with pytest.raises(ConfigError, match="'batch_size' stands there twice"):
        load_preset(preset)
    with pytest.raises(ConfigError, match=': 255 stands there twice'):
        parse_overrides(['mask_values={0: 0, 255: 1, 255: 2}'])
    preset.write_text("config = {'batch_size': 4, 'mask_values': {'batch_size': 1}}")
    assert load_preset(preset)['batch_size'] == 4


def test_a_preset_that_is_no_text_is_a_config_error(tmp_path):
    (tmp_path / 'x.py').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ConfigError):
        load_preset('x.py')


def test_presets_that_are_no_name_are_refused():
    with pytest.raises(ConfigError, match='cannot be read: No such file'):
        resolve_config(np.zeros(2))


def test_a_preset_without_an_end_is_refused_by_its_size(tmp_path):
    with open(tmp_path / 'p.py', 'wb') as file:
        file.truncate(2**33)                                           # 8 GiB of nothing
    with pytest.raises(ConfigError, match='p.py cannot be read: not a file of less than 1 MiB; there are best'):
        resolve_config(str(tmp_path / 'p.py'))


def test_a_preset_keeps_its_spelling():
    os.mkdir('2024_01')
    write_preset("config = {'batch_size': 2}", '2024_01/config.py')
    assert parse_command(['--preset', '2024_01']).preset == '2024_01'


def test_a_run_folder_is_a_preset_and_a_mark_of_windows_no_fault(tmp_path):
    (tmp_path / 'runs' / 'x').mkdir(parents=True)
    text = "config = {'batch_size': 3}"
    (tmp_path / 'runs' / 'x' / 'config.py').write_bytes(b'\xef\xbb\xbf' + text.encode())
    assert load_preset(tmp_path / 'runs' / 'x') == {'batch_size': 3}
    (tmp_path / 'fast').mkdir()                                        # a folder without a config.py is none
    assert load_preset('fast') != {'batch_size': 3}


def test_a_folder_of_the_name_of_a_preset_is_not_that_preset(tmp_path):
    (tmp_path / 'debug').mkdir()
    (tmp_path / 'debug' / 'config.py').write_text('DEBUG = True')
    assert load_preset('debug')['num_epochs'] > 0


def test_problems_inside_a_preset_are_told_with_its_name():
    path = write_preset("config = {'batchsize': 4}")
    with pytest.raises(ConfigError, match=r"mine\.py(.|\n)*did you mean 'batch_size'"):
        resolve_config(path)


def test_config_text_round_trips():
    config = resolved(data='a\'b"\\c\n\u00e4', image_size=[512, 384], lr=1.5e-7, num_epochs=3,
                      mask_values={255: 1, '#ff0000': 2}, class_names=['x', 'y' * 200, 'z'])
    path = write_preset(train_unet.config_text(config))
    assert load_preset(path) == {k: v for k, v in config.items() if k not in ('run_dir', 'resume')}


def test_the_config_of_a_run_is_a_preset_that_repeats_it(small_set):
    _, settled = dataset(small_set)
    again = resolved(write_preset(train_unet.config_text(settled)))
    assert again == {k: settled[k] for k in CONFIG}


# --- validation: values ---------------------------------------------------------------


@pytest.mark.parametrize('key, value', [
    ('learning_rate', 1), ('image_size', [512, 384]), ('mask_values', '>127'),
    ('mask_values', 'nonzero'), ('mask_values', {255: 1, '#ff0000': 2}), ('ignore_index', None),
    ('device', 'cuda:3'), ('use_amp', 'auto'), ('num_classes', 255), ('class_weights', [1, 2.5]),
    ('tf32_matmul_precision', None), ('mean', [0.5, 0.5, 0.5]),
])
def test_accepted(key, value):
    assert resolved(**{key: value})[key] == value


@pytest.mark.parametrize('key, value, meant', [
    ('image_size', 512, [512, 512]), ('mean', 0.5, [0.5]), ('std', 1, [1.0]),
    ('image_size', '384x512', [384, 512]), ('image_size', '64', [64, 64])])
def test_a_number_or_a_text_may_stand_for_a_list(key, value, meant):
    assert resolved(**{key: value})[key] == meant


@pytest.mark.parametrize('key', ['use_amp', 'num_workers', 'learning_rate', 'cache_images'])
def test_auto_may_be_spelled_auto(key):
    assert resolved(**{key: 'Auto'})[key] == 'auto'


def test_cases_do_not_matter_for_devices_and_encoders_nor_in_contradictions():
    assert resolved(device='CPU')['device'] == 'cpu' and resolved(encoder='ResNet34')['encoder'] == 'resnet34'
    assert resolved(amp_dtype='BFloat16', bf16=True)['amp_dtype'] == 'bfloat16'


@pytest.mark.parametrize('key, value, told', [
    ('batch_size', 0, 'at least 1'), ('batch_size', 2.5, 'whole number'),
    ('batch_size', 'auto', 'whole number'), ('batch_size', True, 'whole number'),
    ('learning_rate', 0, 'above 0'), ('learning_rate', float('nan'), 'above 0'),
    ('num_classes', 1, 'at least 2'), ('val_fraction', 0.95, 'at most 0.9'),
    ('image_size', [512], '2 whole numbers'), ('image_size', [1.5, 2], 'whole numbers'),
    ('image_size', ['a', 'b'], 'numbers only'), ('decoder_channels', [8] * 4, '5 whole numbers'),
    ('mean', [], 'one or more'), ('class_weights', [float('inf')], 'at most'),
    ('use_amp', 'yes', 'True or False'), ('data', '', 'has not the right form'),
    ('images', 'a\0b', 'has not the right form'), ('device', '0,1', 'torchrun'),
    ('device', 'cuda:0\n', 'cuda'), ('group_pattern', '(', 'regular expression'),
    ('image_pattern', 'x.png', '{stem}'), ('mask_pattern', '{stem}{stem}', '{stem}'),
    ('mask_values', {}, 'empty'), ('mask_values', 'white', 'nonzero'),
    ('mask_values', {255: 256}, '0..254'), ('mask_values', {'red': 1}, '#ff0000'),
    ('tf32_matmul_precision', 'exact', 'highest'),
])
def test_refused(key, value, told):
    [problem] = problems_of(**{key: value})
    assert problem.startswith(f'{key}={value!r}') and told in problem


@pytest.mark.parametrize('key', ['size_policy', 'architecture', 'tf32_matmul_precision'])
def test_auto_is_refused_where_it_is_no_choice(key):
    assert 'choose from' in problems_of(**{key: 'auto'})[0]


def test_float32_is_no_amp_dtype_and_float16_no_advice():
    [problem] = problems_of(amp_dtype='float32')
    assert 'use_amp=False' in problem and 'float16' not in problem


@pytest.mark.parametrize('changes', [{'class_names': [None, 2]}, {'mask_values': {0: 0, 255: True}}])
def test_what_was_taken_for_granted_is_refused(changes):
    assert len(problems_of(**changes)) == 1


# --- validation: names that libraries know --------------------------------------------


def test_names_that_only_the_libraries_know_are_told_in_the_same_block(forks):
    words = {'batchsize': 3, 'encoder': 'resnet19', 'optimizer': 'adamwx', 'augment': 'nothing.json'}
    process = start_script(words, 'said.txt')
    process.join(120)
    with open('said.txt') as file:
        said = file.read()
    assert process.exitcode == 2 and said.startswith('4 problems in the config (4 overrides):')
    assert all(words[key] in said for key in ('encoder', 'optimizer', 'augment'))
    assert "did you mean 'resnet18'?" in said and "did you mean 'batch_size'?" in said


def test_one_wrong_name_is_one_problem():
    assert [len(problems_of(encoder=name)) for name in ('resnet19', 'hf-hub:x/y', '')] == [1, 1, 1]


def test_a_long_list_of_names_ends_at_a_whole_one():
    problem, = problems_of(encoder='zzz')
    assert re.search(r"there is no such name; there are resnet18, (\w+, ){11}\.\.\. and \d{3,4} more$", problem)


def test_names_of_timm_are_known_and_the_nearest_is_suggested():
    assert "did you mean 'tu-resnet18'?" in problems_of(encoder='tu-resnet19')[0]
    assert "did you mean 'tu-resnet10t'?" in problems_of(encoder='resnet10t')[0]
    assert "did you mean 'tu-tf_efficientnet_b0'?" in problems_of(encoder='tf_efficientnet_b0')[0]
    assert resolve_config(None, {'encoder': 'tu-resnet18.a1_in1k'})


@pytest.mark.parametrize('name', ['tu-tf_efficientnet_b0_ns', 'tu-gluon_resnet50_v1d', 'timm-mobilenetv3_large_100',
                                  'timm-resnest14d', 'timm-efficientnet-b0'])
def test_older_names_of_encoders_are_taken(name):
    """timm and smp still build them, but list them no longer; a run may have been trained with one."""
    assert resolve_config(None, {'encoder': name, 'encoder_weights': 'imagenet'})[0]['encoder'] == name


def test_weights_that_an_encoder_does_not_have_are_told_at_once():
    assert "did you mean 'imagenet'?" in problems_of(encoder='resnet18', encoder_weights='imagenett')[0]


# --- how problems are told ------------------------------------------------------------


def test_all_problems_are_told_at_once():
    told = '\n'.join(problems_of(numepochs=5, batch_size=0, loss='dise', precision='17', lr='x'))
    assert [word in told for word in ('numepochs', 'batch_size', 'dise', 'precision', 'learning')] \
        == [True] * 5


@pytest.mark.parametrize('words', [
    ['train_data', 'batch_size=0'], ['--preset', 'fats', 'batch_size=0'],
])
def test_a_stray_word_or_preset_hides_no_other_problem(words):
    with pytest.raises(ConfigError) as caught:
        parse_command(words)
    assert 'batch_size=0' in str(caught.value)


@pytest.mark.parametrize('key, meant', [
    ('numepochs', 'num_epochs'), ('batchsize', 'batch_size'), ('LR', 'lr'),
    ('learning-rate', 'learning_rate'), ('amp_dytpe', 'amp_dtype'),
])
def test_unknown_keys_get_a_suggestion(key, meant):
    assert f"did you mean '{meant}'?" in problems_of(**{key: 1})[0]


@pytest.mark.parametrize('key, told', [
    ('imgsz', "did you mean 'image_size'?"), ('patch_size', "did you mean 'image_size'?"),
    ('trainer.max_steps', 'num_epochs counts passes'), ('model.lr', "did you mean 'lr'?"),
    ('encoder.weights', "did you mean 'encoder_weights'?"), ('patchSize', "did you mean 'image_size'?"),
    ('maxSteps', 'num_epochs counts passes'),
    ('trainer.max_epochs', "did you mean 'epochs'?"), ('model.encoder_name', "did you mean 'encoder'?"),
    ('work_dir', "did you mean 'run_dir'?"), ('weights', 'initial_weights is where train starts'),
    ('pretrained', "did you mean 'encoder_weights'?"), ('max_grad_norm', "did you mean 'grad_clip'?"),
    ('scheduler', 'always falls along a cosine'), ('gpus', 'torchrun --nproc_per_node=2'),
    ('fast_dev_run', 'type --preset debug'), ('criterion', 'train(loss_fn=...)'), ('fliplr', "did you mean 'mirror'?"),
    *[(word, 'no secret is kept here') for word in ('hf_token', 'wandb.api_key', 'slack_webhook', 'smtp_password')],
    *[(word, 'the keys are those of CONFIG') for word in ('task', 'plots', 'time', 'splitter', 'adam_beta1',
                                                                     'thing.name')]])
def test_words_of_other_trainers_are_told_what_they_are_here(key, told):
    """imgsz was sent to 'images', patch_size to 'batch_size', task to 'masks'."""
    [problem] = problems_of(**{key: 1})
    assert problem.startswith(f"unknown key '{key}': ") and told in problem


def test_what_is_meant_by_a_word_of_another_trainer_is_a_key():
    for word, meant in train_unet.ELSEWHERE.items():
        assert word not in {*CONFIG, *SHORT_NAMES, *FOREIGN}
        assert ' ' in meant or meant in CONFIG
    assert {*train_unet.VERBS}.isdisjoint(train_unet.COMMANDS)


@pytest.mark.parametrize('words, told', [
    (['val', 'runs/x'], "'val' is no command and no key=value: did you mean 'evaluate'?"),
    (['infer', 'runs/x'], "did you mean 'predict'?"), (['-e', '5'], "unknown key 'e': did you mean 'num_epochs'?"),
    (['--scale', '0.5'], "unknown key 'scale': did you mean 'image_size'?"),
    (['--fast-dev-run', '--epochs', '3'], 'type --preset debug')])
def test_commands_and_letters_of_other_trainers_are_told_what_they_are_here(words, told):
    with pytest.raises(ConfigError) as error:
        parse_command(words)
    assert told in str(error.value)
    assert '-e' not in words or len(error.value.problems) == 1


@pytest.mark.parametrize('words, key, value', [
    (['device=0'], 'device', 'cuda:0'), (['device=7'], 'device', 'cuda:7'), (['--device', 'gpu'], 'device', 'cuda'),
    (['--resume', '-o', 'x'], 'resume', 'auto'), (['--resume', '-o', 'x'], 'run_dir', 'x'),
    (['--resume', 'data=x'], 'resume', 'auto'), (['--resume', 'data=x'], 'data', 'x'),
    (['--data', 'a=b'], 'data', 'a=b'), (['--resume', 'lr=1e-3'], 'learning_rate', 0.001),
    (['resume=True'], 'resume', 'auto'), (['--no-resume'], 'resume', None), (['resume=False'], 'resume', None),
    (['-lr', '1e-3'], 'learning_rate', 0.001), (['-o', 'x'], 'run_dir', 'x')])
def test_usual_words_of_other_trainers_are_understood(words, key, value):
    assert resolved(**parse_command(words).overrides)[key] == value


@pytest.mark.parametrize('overrides, told', [
    ({'optimizer': object()}, 'its settings are learning_rate, weight_decay and momentum'),
    ({'augment': False}, "'none' is none"), ({'loss': len}, 'loss_fn'), ({'data': [1]}, 'train_data'),
    ({'num_classes': 1}, 'the background counted')])
def test_things_in_place_of_names_are_told_where_they_go(overrides, told):
    assert told in problems_of(**overrides)[0]


@pytest.mark.parametrize('value', [[np.ones(2)], [np.zeros((2, 2))], [[0, 0]]])
def test_weights_that_are_no_numbers_are_refused(value):
    assert 'class_weights' in problems_of(class_weights=value)[0]


def test_weights_of_which_none_is_above_0_are_refused():
    assert 'one of them must be above 0' in problems_of(class_weights=[0, 0])[0]


def test_a_colour_with_alpha_is_no_number_of_a_value():
    """{0xFFFF0000: 1} was an OverflowError, {16777221: 1} the colour #000005."""
    assert "a colour such as '#ff0000'" in problems_of(mask_values={0xFFFF0000: 1})[0]
    assert problems_of(mask_values={2**24 + 5: 1}) and resolved(mask_values={2**24 - 1: 1})


def test_a_table_as_data_is_told_where_it_goes():
    """What a comparison of a DataFrame gives has no truth."""
    class Table:
        __hash__ = None

        def __eq__(self, other):
            return self

        __ne__ = __eq__

        def __bool__(self):
            raise ValueError('ambiguous')

    assert 'Datasets go into train_data' in problems_of(data=Table())[0]


def test_numbers_and_names_of_numpy_become_pythons_own():
    """Also within lists and dicts: last.pt, of plain values alone, would not be read again."""
    config = resolved(class_weights=[1, np.float64(5)], mean=(np.float32(0.5),), image_size=[np.int64(64), 96],
                      class_names=[np.str_('a'), 'b'], mask_values={np.uint8(0): 0, np.uint8(255): np.int64(1)})
    written = load_preset(write_preset(train_unet.config_text(config)))
    assert {key: config[key] for key in written} == written and written['mask_values'] == {0: 0, 255: 1}
    kinds = {type(value) for key in ('class_weights', 'mean', 'image_size', 'class_names') for value in config[key]}
    assert kinds == {int, float, str}


@pytest.mark.parametrize('key, line, value', [
    ('mask_values', '{0: 0, 255: 1}', {0: 0, 255: 1}), ('mask_values', '>127', '>127'),
    ('class_names', '[a,b]', ['a', 'b']), ('class_weights', '[1,5]', [1, 5]), ('class_weights', 'auto', 'auto'),
    ('class_weights', '1,5', [1, 5]),
    ('image_size', '384x512', [384, 512]),
    ('group_pattern', '[12]', '[12]')])
def test_a_line_that_was_printed_can_be_given_to_train(key, line, value):
    """mask_values="{0: 0, 255: 1}" in a notebook was refused, with the advice to type just that."""
    assert resolved(**{key: line})[key] == value


def test_a_preset_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    write_preset("config = {'batch_size': 3}", str(tmp_path / 'mine.py'))
    (tmp_path / 'run').mkdir()
    write_preset("config = {'batch_size': 5}", str(tmp_path / 'run/config.py'))
    assert load_preset('~/mine.py') == {'batch_size': 3} and load_preset('~/run') == {'batch_size': 5}
    with pytest.raises(ConfigError, match='cannot be read'):
        load_preset('~a\0b')


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems have other letters in names')
def test_a_run_on_data_of_a_name_in_other_letters_is_named_after_it():
    assert str(train_unet.choose_run_dir(CONFIG, '実験 1.2')) == os.path.join('runs', '実験_1_2-1')


def test_names_in_other_letters_are_told_apart(tmp_path):
    """All of them were one name, of no letters."""
    (tmp_path / 'снимки').mkdir()
    with pytest.raises(train_unet.DataError) as caught:
        train_unet.existing_folder(tmp_path / 'данные')
    assert str(caught.value).endswith('there is no such folder')


def test_spaces_of_other_scripts_are_kept_in_what_is_printed():
    assert train_unet.clean('a\u3000b\xa0c\u202fd\u2028e\n') == 'a\u3000b\xa0c\u202fd\\u2028e\\n'


def test_a_folder_or_a_dict_as_preset_is_told_what_it_is(tmp_path):
    assert 'if it holds the data it is data=' in problems_of(str(tmp_path))[0]
    assert 'train(**settings)' in problems_of({'data': 'x'})[0]


def test_a_tuple_in_CONFIG_is_not_called_its_default(monkeypatch):
    monkeypatch.setitem(CONFIG, 'batch_size', (8,))
    assert problems_of() == ['batch_size=[8]: must be a whole number']


def test_unknown_choices_and_presets_get_a_suggestion():
    assert "did you mean 'dice'?" in problems_of(loss='dise')[0]
    assert "did you mean 'fast'?" in problems_of('fats')[0]


@pytest.mark.parametrize('key, value, meant', [('architecture', 'unet++', 'UnetPlusPlus'),
                                               ('architecture', 'deeplabv3+', 'DeepLabV3Plus')])
def test_a_plus_is_a_plus(key, value, meant):
    assert f"did you mean '{meant}'?" in problems_of(**{key: value})[0]


@pytest.mark.parametrize('overrides, told', [
    ({'class_names': 'nucleus'}, 'as in class_names="[background,nucleus]"'),
    ({'presset': 'fast'}, "did you mean 'preset'?"),
    ({'encoder': 'tu-test_resnet', 'encoder_weights': 'imagnet'}, "did you mean 'imagenet'?"),
    ({'encoder_weights': 'imagnet'}, "did you mean 'imagenet'?")])
def test_a_mistake_gets_what_to_type_instead(overrides, told):
    assert told in problems_of(**overrides)[0]


@pytest.mark.parametrize('key', ['hf_token', 'WANDB_API_KEY', 'password', 'passwd', 'access_key', 'slack_webhook'])
def test_a_secret_is_refused_and_not_repeated(key):
    told = str(problems_of(**{key: 'hunter2'}))
    assert f'unknown key {key!r}' in told and 'hunter2' not in told


@pytest.mark.parametrize('typed, meant', [
    ('predict runs/x x.png treshold=0.3', 'threshold'), ('evaluate runs/x spilt=test', 'split'),
    ('export runs/x fromat=pt2', 'format'), ('predict runs/x x.png skip_exist=True', 'skip_existing')])
def test_words_of_a_command_are_suggested_for_what_is_like_them(typed, meant):
    with pytest.raises(ConfigError) as error:
        train_unet.parse_command(typed.split())
    key = typed.split()[-1].partition('=')[0]
    assert error.value.problems == [f"unknown key {key!r}: did you mean {meant!r}?"]


def test_words_of_commands_that_are_no_flags_are_not_taken_for_them():
    typed = train_unet.parse_command('predict runs/x x.png threshold=0.3 save=overlay tta=True'.split())
    assert typed.own == {'threshold': 0.3, 'save': 'overlay', 'tta': True}
    assert not train_unet.wrong_flags({'tta': np.bool_(True), 'half': False})


@pytest.mark.parametrize('typed, told', [('evaluate runs/x val_split=0.2', "'val_fraction'"),
                                         ('predict runs/x x.png saved_to=m', ': the keys are those')])
def test_keys_come_before_words_of_a_command(typed, told):
    with pytest.raises(train_unet.ConfigError, match=told):
        train_unet.parse_command(typed.split())


def test_a_size_that_is_a_product_is_told_the_form():
    with pytest.raises(train_unet.ConfigError, match=r"image_size='24\*40': .*as in image_size=384x512"):
        train_unet.parse_command(['image_size=24*40'])


def test_terminal_escapes_are_made_visible():
    assert '\x1b' not in str(ConfigError('\x1b[31mred'))


# --- CONFIG edited in the file --------------------------------------------------------


@pytest.mark.parametrize('edit, told', [
    ({'batchsize': 8}, "unknown key 'batchsize': did you mean 'batch_size'?"),
    ({'threshold': 0.3}, "unknown key 'threshold': it is a word of predict"),
    ({'seed': None}, 'seed=None: must be a whole number'),
    ({'deterministic': 'False'}, "deterministic='False': must be True or False"),
    ({'batch_size': 8.5}, 'batch_size=8.5: must be a whole number'),
    ({'batch_size': 'auto'}, "batch_size='auto': must be a whole number"),
    ({'device': None}, 'device=None: must be')])
def test_a_config_edited_in_the_file_is_checked_as_typed_words_are(monkeypatch, edit, told):
    for key, value in edit.items():
        monkeypatch.setitem(train_unet.CONFIG, key, value)
    with pytest.raises(ConfigError) as error:
        resolve_config()
    assert told in str(error.value)


def test_a_key_that_is_mistyped_in_CONFIG_is_told_once(monkeypatch):
    edited = {'batchsize' if key == 'batch_size' else key: value for key, value in CONFIG.items()}
    monkeypatch.setattr(train_unet, 'CONFIG', edited)
    assert problems_of() == ["unknown key 'batchsize': did you mean 'batch_size'?"]


@pytest.mark.parametrize('keys', [['seed'], ['grad_clip'], ['ignore_index', 'resume', 'encoder', 'augment']])
def test_a_key_deleted_from_the_config_is_told(monkeypatch, keys):
    """Those that may be None were None: a line commented out for its default took clipping away."""
    monkeypatch.setattr(train_unet, 'CONFIG', {key: value for key, value in CONFIG.items() if key not in keys})
    assert problems_of() == [f"CONFIG has no '{key}': put its line back" for key in sorted(keys)]


def test_an_edited_config_tells_all_of_its_mistakes(monkeypatch):
    for key, value in {'batchsize': 8, 'num_workers': 'x', 'batch_size': '8', 'lr': 1e-3}.items():
        monkeypatch.setitem(train_unet.CONFIG, key, value)
    with pytest.raises(ConfigError) as error:
        resolve_config(None, {'lr': 'abc'}, found=['found before'])
    told = str(error.value)
    for part in ("unknown key 'batchsize': did you mean 'batch_size'", "num_workers='x': must be",
                 "learning_rate='abc'", 'lr=0.001: learning_rate is there too', 'found before'):
        assert part in told
    assert "batch_size='8': must be a whole number" in told and "('8' is the default)" not in told


# --- words of other trainers ----------------------------------------------------------


@pytest.mark.parametrize('foreign, use_amp, amp_dtype', [
    ({'precision': 'bf16-mixed'}, True, 'bfloat16'),
    ({'mixed_precision': '16-mixed'}, True, 'float16'), ({'precision': 'no'}, False, 'auto'),
    ({'precision': '16-mixed'}, True, 'float16'),
    ({'precision': 16}, True, 'float16'),
    ({'precision': '32-true'}, False, 'auto'),
    ({'precision': 32}, False, 'auto'),
    ({'precision_type': 'fp16'}, True, 'float16'),
    ({'amp_dtype': 'fp16'}, 'auto', 'float16'),
    ({'amp_dtype': 'BF16'}, 'auto', 'bfloat16'),
    ({'precision_type': 'FP32'}, False, 'auto'),
    ({'mixed_precision': True}, True, 'auto'),
    ({'mixed_precision': 'no'}, False, 'auto'),
    ({'mixed_precision': 'bf16'}, True, 'bfloat16'),
    ({'amp': False}, False, 'auto'),
    ({'fp16': True}, True, 'float16'),
    ({'bf16': True}, True, 'bfloat16'),
    ({'bf16': False}, False, 'auto'),
    ({'bf16': False, 'fp16': False}, False, 'auto'),
    ({'fp16': False, 'bf16': True}, True, 'bfloat16'),
    ({'fp16': False, 'amp_dtype': 'bfloat16'}, 'auto', 'bfloat16'),
    ({'fp16': False, 'precision': 'bf16-mixed'}, True, 'bfloat16'),
    ({'precision': '16', 'amp_dtype': 'float16'}, True, 'float16'),
    ({'training.mixed_precision.enabled': True}, True, 'auto'),
    ({'training.mixed_precision.enabled': False, 'training.mixed_precision.dtype': 'bfloat16'}, False, 'bfloat16'),
    ({'training.mixed_precision.dtype': 'bfloat16'}, 'auto', 'bfloat16'),
    ({'training.mixed_precision.enabled': True, 'training.mixed_precision.dtype': 'bfloat16'},
     True, 'bfloat16'),
])
def test_foreign_words_are_understood(foreign, use_amp, amp_dtype):
    config = resolved(**foreign)
    assert (config['use_amp'], config['amp_dtype']) == (use_amp, amp_dtype)


def test_foreign_words_are_understood_as_typed():
    words = ['--training.mixed_precision.enabled=true', 'training.mixed_precision.dtype=bfloat16']
    config = resolved(**parse_command(words).overrides)
    assert (config['use_amp'], config['amp_dtype']) == (True, 'bfloat16')


def test_foreign_words_override_a_preset():
    assert resolved('stable', bf16=True)['use_amp'] is True


@pytest.mark.parametrize('refused', ['bf16', 'fp16'])
def test_a_refused_dtype_is_float32_whatever_the_preset_has_and_says_so(refused):
    preset = write_preset("config = {'use_amp': True, 'amp_dtype': 'float16'}")
    config, _, notes = resolve_config(preset, {refused: False})
    assert config['use_amp'] is False and notes == [f'{refused}=False is understood as use_amp=False']


@pytest.mark.parametrize('foreign, notes', [
    ({'precision': 'bf16-mixed'}, ["precision=bf16-mixed is understood as use_amp=True",
                                   "precision=bf16-mixed is understood as amp_dtype='bfloat16'"]),
    ({'amp': True, 'use_amp': True}, ['amp=True is understood as use_amp=True']),
])
def test_a_translation_is_told(foreign, notes):
    assert resolve_config(None, foreign)[2] == notes


@pytest.mark.parametrize('foreign', [
    {'fp16': True, 'bf16': True},
    {'precision': '16-mixed', 'amp_dtype': 'bfloat16'},
    {'precision': '32-true', 'bf16': True},
    {'precision': '32-true', 'use_amp': True},
    {'mixed_precision': False, 'fp16': True},
    {'amp': True, 'use_amp': False},
    {'bf16': True, 'use_amp': False},
    {'training.mixed_precision.enabled': False, 'use_amp': True},
])
def test_contradictions_are_told_once_and_name_both_words(foreign):
    [problem] = problems_of(**foreign)
    assert 'contradict' in problem
    assert all(key in problem or key.endswith('enabled') for key in foreign)


@pytest.mark.parametrize('words', [
    {'fp16': False, 'precision': '16-mixed'}, {'bf16': False, 'precision': 'bf16-mixed'},
    {'bf16': False, 'use_amp': True}, {'fp16': False, 'mixed_precision': True}])    # which an A100 or a V100 would take
def test_a_precision_that_is_refused_and_asked_for_is_a_contradiction(words):
    with pytest.raises(train_unet.ConfigError, match='contradict each other'):
        train_unet.resolve_config(None, words)


@pytest.mark.parametrize('key', FOREIGN)
def test_an_unknown_foreign_value_names_the_choices(key):
    assert f'choose from {", ".join(FOREIGN[key])}' in problems_of(**{key: 'fp8'})[0]


# --- whatever is given: a config or a ConfigError -------------------------------------


NASTY = [None, True, 0, -1, 2 ** 64, 10 ** 400, -10 ** 5000, 0.5, float('nan'), float('-inf'), 1j,
         '', 'auto', 'a\0b', 'a\nb', '\x1b[0m', '\ud800', '(' * 5000, 'x{99999999999999999999}',
         'cuda:', '>1', '{stem}', 'float16', '32', 'x' * 10 ** 5, b'', ..., (), [], {}, set(), [[]],
         [None] * 5, [10 ** 5000], [float('nan')] * 2, ['a', 1], {1: {}}, {(): 1}, {10 ** 5000: 1},
         {'a': 10 ** 5000}, object(), int, np.ones(3), np.float64(1), ROOT]


@pytest.mark.parametrize('index', range(len(NASTY)), ids=lambda i:
                         f'{type(NASTY[i]).__name__}{i}')
def test_any_key_with_an_awkward_value_gives_a_config_or_a_config_error(index):
    refused = 0
    for key in [*CONFIG, *SHORT_NAMES, *FOREIGN]:
        of_precision = key in FOREIGN or key in ('use_amp', 'amp_dtype')       # others meet neither
        for more in ({}, *[{'bf16': True}, {'precision': 32}] * of_precision):
            try:
                resolve_config(None, {**more, key: NASTY[index]})
            except ConfigError:
                refused += 1
    assert refused > len(CONFIG) / 3                                   # no value suits most keys


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
                   st.binary(max_size=3), st.complex_numbers(), st.just(...),
                   st.sampled_from([10 ** 400, '', 'auto', 'a\0b', 'a\nb', '\ud800', '(', 'fp16']))
HASHABLE = st.one_of(st.integers(), st.text(max_size=8), st.none(), st.tuples(st.floats()))
VALUES = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(HASHABLE, inner, max_size=3)),
    max_leaves=6)
KEYS = st.sampled_from([*CONFIG, *SHORT_NAMES, *FOREIGN]) | st.text(max_size=12)
FUZZ = settings(max_examples=150, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=6))
def test_random_overrides_give_a_config_or_a_config_error(overrides):
    try:
        config = resolve_config(None, overrides)[0]
    except ConfigError as error:
        assert error.problems
    else:
        assert list(config) == list(CONFIG)


def likely(key):
    """Values that a person may type for this key, most of them possible."""
    kinds, (low, high) = train_unet.TYPES[key], train_unet.RANGES.get(key, (0, 1))
    number = st.integers(low, min(high, 300)) if 'int' in kinds or key == 'decoder_channels' else \
        st.floats(low, min(high, 1))
    ways = [st.just(word) for word in ('auto', None) if (word or 'none') in kinds]
    ways += [st.sampled_from(train_unet.CHOICES[key])] if key in train_unet.CHOICES else []
    ways += [st.booleans()] * ('bool' in kinds) + [number] * ('int' in kinds or 'float' in kinds)
    ways += [st.lists(number, min_size=1, max_size=5)] * ('list' in kinds)
    ways += [st.sampled_from(['nonzero', '>127', {0: 0, 255: 1}, {255: 0, 0: 1}, {7: 1}])] * ('dict' in kinds)
    return st.one_of(ways or [st.just(CONFIG[key])])


def settings_of_a_person(key):
    """(key, value): nonsense one time in ten."""
    return st.tuples(st.just(key), st.integers(0, 9).flatmap(lambda odd: likely(key) if odd else VALUES))


def test_random_settings_give_a_plan_or_an_error_of_ours(small_set):
    """Not only a config: all that is settled before a network is built, on real images."""
    plans = []

    @settings(FUZZ, max_examples=60)                                   # 30 ms each
    @given(st.lists(st.sampled_from([key for key in CONFIG if key not in ('data', 'resume')])
                    .flatmap(settings_of_a_person), max_size=6))
    def plan(chosen):
        try:
            config, sources, _ = resolve_config(None, {**dict(chosen), 'data': str(small_set)})
            config = train_unet.prepare(config, sources, train_unet.choose_device(config['device']))[0]
        except train_unet.UserError as error:
            assert error.problems
        else:
            assert list(config) == list(CONFIG) and config['num_classes'] >= 2
            plans.append(config)

    plan()
    assert len(plans) > 12


TYPED = st.one_of(st.text(max_size=20), st.sampled_from([
    '1' * 5000 + 'x1', '0x' + 'f' * 5000, '[' * 5000, '-' * 5000 + '1', '1e999', 'a\0b', '[1]',
    '{}', '{1: [2]}', '{[1]: 2}', '1+2j', "b'x'", '...', '-1', '8', 'true', 'auto', 'none']))
TYPED_WORDS = st.one_of(TYPED, st.tuples(st.sampled_from(['', '--']), KEYS, TYPED).map(
    lambda t: f'{t[0]}{t[1]}={t[2]}'), KEYS.map('--{}'.format))


@FUZZ
@given(st.lists(TYPED_WORDS, min_size=1, max_size=4))
def test_random_words_give_a_command_or_a_config_error(words):
    try:
        command = parse_command(words)
    except ConfigError as error:
        assert error.problems
    except SystemExit as end:
        assert not end.code and {'-h', '--help', 'help'} & set(words)
    else:
        assert command.verb in train_unet.COMMANDS


# --- libraries that are missing -------------------------------------------------------


def test_a_library_that_only_names_want_is_missed_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, 'timm', None)
    with pytest.raises(train_unet.UserError, match='pip install -r requirements.txt'):
        resolve_config(None, {'encoder': 'resnet18'})


def test_a_package_that_lacks_what_it_needs_is_told_at_its_first_use(tmp_path, monkeypatch):
    (tmp_path / 'halfway.py').write_text('import a_package_that_nobody_has')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(train_unet.UserError, match='a_package_that_nobody_has.*pip install -r requirements.txt'):
        train_unet.ImportedWhenUsed('halfway').anything
    with pytest.raises(train_unet.UserError, match='another_package.*pip install -r requirements.txt'):
        train_unet.ImportedWhenUsed('another_package').anything
    (tmp_path / 'unfit.py').write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.raises(train_unet.UserError, match='nms does not exist.*pip install -r requirements.txt'):
        train_unet.ImportedWhenUsed('unfit').anything
    for kind in (OSError, ValueError):                                 # a DLL; numpy.dtype size changed
        (tmp_path / f'of_{kind.__name__}.py').write_text(f"raise {kind.__name__}('it does not suit')")
        with pytest.raises(train_unet.UserError, match='it does not suit: type  pip install -r requirements.txt'):
            train_unet.ImportedWhenUsed(f'of_{kind.__name__}').anything
    (tmp_path / 'older.py').write_text('from os import a_name_that_came_later')
    with pytest.raises(train_unet.UserError, match='a_name_that_came_later.*pip install -r requirements.txt'):
        train_unet.ImportedWhenUsed('older').anything


# --- the source -----------------------------------------------------------------------


SOURCE = (ROOT / 'train_unet.py').read_text(encoding='utf-8')


def names_its_cause(handler):
    """Whether a handler ends in 'raise ... from error': what their code raises is told, and not lost."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and isinstance(last.cause, ast.Name) and last.cause.id == handler.name


def caught_types():
    """(line, expression) of everything that train_unet.py catches or suppresses."""
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.ExceptHandler) and not names_its_cause(node):
            yield node.lineno, node.type
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith('suppress'):
            yield from ((node.lineno, arg) for arg in node.args)


def names_everything(expression):
    """Whether an except clause is bare or holds Exception or BaseException, by itself or in a
    tuple of the module."""
    if expression is None:
        return True
    names = [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
    types = []
    for name in names:
        found = getattr(train_unet, name, getattr(builtins, name, None))
        types += found if isinstance(found, tuple) else [found]
    return Exception in types or BaseException in types


def test_no_handler_catches_everything():
    caught = list(caught_types())
    assert len(caught) > 20
    assert [line for line, expression in caught if names_everything(expression)] == []


def test_every_key_has_a_comment_on_its_line():
    [table] = [node.value for node in ast.parse(SOURCE).body if isinstance(node, ast.Assign)
               and ast.unparse(node.targets[0]) == 'CONFIG']
    tokens = tokenize.generate_tokens(io.StringIO(SOURCE).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    assert [key.value for key in table.keys if key.lineno not in commented] == []


@pytest.mark.parametrize('table', ['TYPES', 'CHOICES', 'RANGES', 'LENGTHS', 'ABOVE_ZERO'])
def test_tables_name_only_keys_of_config(table):
    assert set(getattr(train_unet, table)) <= set(CONFIG)


def test_short_and_foreign_names_do_not_hide_a_key():
    assert set(SHORT_NAMES.values()) <= set(CONFIG)
    assert not (set(SHORT_NAMES) | set(FOREIGN)) & set(CONFIG)


def test_script_header_and_requirements_name_the_same_packages():
    header = re.search(r'(?m)^# /// script$(.*?)^# ///$', SOURCE, re.DOTALL)[1]
    in_script = ast.literal_eval(re.search(r'dependencies = (\[.*?\])', header.replace('\n#', ''), re.DOTALL)[1])
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    required = [line.split('#')[0].strip() for line in lines]
    assert sorted(in_script) == sorted(filter(None, required))


def test_what_torch_calls_a_device_or_dtype_is_understood():
    import torch
    config, *_ = train_unet.resolve_config(None, {'device': torch.device('cpu'), 'amp_dtype': torch.bfloat16})
    assert (config['device'], config['amp_dtype']) == ('cpu', 'bfloat16')


def test_a_name_in_a_list_may_end_in_a_bracket():
    words = ['class_names=[background,low vegetation (grass)]', 'image_size=64x96']
    assert train_unet.parse_overrides(words)[0] == {'class_names': ['background', 'low vegetation (grass)'],
                                            'image_size': [64, 96]}
