# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "segmentation-models-pytorch>=0.5", "albumentations>=2.0.8", "tqdm",
#                 "pillow>=10.1", "matplotlib", "scipy", "tifffile", "pytest"]
# ///
"""train_unet: train a segmentation network with mixed precision, on whatever machine you have.

    python train_unet.py                                train on a built-in demo set
    python train_unet.py data=PATH                      train on your images and masks
    python train_unet.py data=PATH --preset fast        ... with the settings of configs/fast.py
    python train_unet.py data=PATH num_epochs=5 lr=1e-3 ... with settings of your own
    python train_unet.py resume=runs/x                  continue a run that was stopped

    python train_unet.py check data=PATH                look at the data, settings and hardware; train nothing
    python train_unet.py tune data=PATH                 measure which precision this machine wants, what batch fits
    python train_unet.py evaluate runs/x [split=test] [data=PATH]   score the best weights, draw the worst images
    python train_unet.py predict runs/x IMAGE... [-o OUT]   write masks (save=palette, overlay or probability)
    python train_unet.py export runs/x [format=onnx]        for other programs: onnx, pt2, smp (half=True)

Every setting is a key of CONFIG below: edit it there, put it into a preset, or type key=value.

In a notebook:  import train_unet;  result = train_unet.train(data='PATH', num_epochs=5)

The file, top to bottom:
    CONFIG          the settings, each with its unit, its choices, or when to change it
    config          presets, overrides, validation: every problem at once, before torch is imported unless a name of
                    a network, optimizer or pipeline has to be looked up
    runtime         what the machine has, and the precision that follows from it, with the reason
    data            pairing, reading, checking, augmenting and loading images and masks
    settling        every 'auto' gets its value, with the reason
    model and loss  the network (uint8 or float32 in, float32 logits out) and one loss per image
    metrics         IoU and Dice from one confusion matrix
    optimisation    optimizer, learning rate, moving average of the weights
    checkpoints     what a run is (TrainState), and how it is saved so that no crash can lose it
    the loop        windows, steps that heal themselves, epochs
    training        train(): what is tried first, the run folder, resuming
    pictures        samples, curves
    using a model   load, predict, evaluate
    export          for other programs
    measuring       memory by part, check, tune
    command line

To see how it trains read fit, then what it calls: train_epoch, guarded_step, commit. Most of the data sections are
about finding out what somebody's files mean; if you read for the training, skip them. To change the loss edit
SegmentationLoss, the network build_network, the augmentation build_augmentation, the optimizer build_optimizer, the
schedule lr_at_step, the scores compute_metrics, by which score_of finds the best epoch, what 'auto' becomes settle
(the precision resolve_precision, mean and std usual_statistics); what reads another file format goes into READERS.
"""
import ast
import atexit
import base64
import contextlib
import copy
import csv
import ctypes
import dataclasses
import datetime
import difflib
import errno
import filecmp
import functools
import gc
import glob
import hashlib
import html
import importlib.metadata
import inspect
import io
import itertools
import json
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import platform
import posixpath
import pprint
import random
import re
import reprlib
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import traceback
import unicodedata
import unittest.mock
import urllib.parse
import urllib.request
import warnings
import weakref
import zipfile
import zlib
from collections import Counter, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# ===== CONFIG =========================================================================

CONFIG = {
    # --- data ---
    'data': 'demo',               # folder, or list file (csv: image,mask[,split]); 'demo' draws a set of pebbles
    'images': None,               # folder of the images inside data, if its name does not say so; * matches any name
    'masks': None,                # folder of the masks; both or neither: images='*/scans' masks='*/manual'
    'image_pattern': None,        # file names of the images, if only a part of each name is shared: '{stem}_image.png'
    'mask_pattern': None,         # file names of the masks: '{stem}_label.png'; '{stem}_*.png' unites several of one
    'skip_unpaired': False,       # True: leave out files without a partner instead of stopping
    'rescale_masks': False,       # True: bring masks of the same proportions to the size of their images;
                                  # 'stretch': masks of any proportions, such as were squeezed into one size
    'val_fraction': 0.2,          # share held out for validation where no folder names a split; 0: validate on the
                                  # training images, which proves nothing but that the network can learn them
    'fold': 0,                    # cross-validation: which of the parts of size val_fraction validates; of 0.2: 0 to 4
    'group_pattern': None,        # regular expression found in each stem, or else in folder/stem: '^[^_]*', '(.*)/';
                                  # images with equal matches (one video, one scan) stay on one side of the split
    'num_classes': 'auto',        # background included; 2 is binary: one output and a threshold
    'class_names': None,          # ['background', 'nucleus']; for the tables
    'mask_values': None,          # their meaning: {255: 1}, {'#ff0000': 1}, '>127', 'nonzero', 'alpha'; None: find out
    'ignore_index': 255,          # mask value left out of loss and metrics; None if 255 is a class
    'in_channels': 3,             # 1 grey, 3 RGB, more for .npy and multi-band TIFF
    'image_size': 'auto',         # pixels: 512, or height x width as 384x512 or [384, 512]; 'auto' follows the images,
                                  # at most 512 (CPU: 256); with size_policy=pad the largest
    'size_policy': 'resize',      # 'resize' to image_size; 'crop' image_size at random, validate by sliding window;
                                  # 'pad' to image_size without scaling
    'augment': 'default',         # 'none', 'default' (mirrored left to right; from 26 epochs on, the more the longer,
                                  # turned, scaled, shifted and, 8 bits, brightened too), 'strong', or an
                                  # albumentations file (A.save(pipeline, 'my.json'))
    'mirror': 'auto',             # whether 'default' and 'strong' mirror left to right; 'auto': unless the places of
                                  # two classes tell that they differ by their side, as left and right eye do
    'mean': 'auto',               # per channel, in the unit of the images; 'auto': that of 100 training images, or
    'std': 'auto',                # what initial_weights or, on 8-bit RGB or grey, encoder_weights are used to
    'image_dtype': 'auto',        # 'uint8' for 8 bits, 'float32' for all others (unsigned 16 bits are divided by 65535)
    'cache_images': 'auto',       # keep resized images in memory: True, False, 'auto' (up to a quarter of what is free)
    'num_workers': 'auto',        # processes that decode and augment; 'auto': 0 on a CPU, on an Apple GPU if all images
                                  # are kept in memory, and for Dataset objects given to train(), else up to 8
    'max_image_pixels': 200_000_000,  # refuse larger files (decompression bombs); raise for real gigapixel scans
    'skip_broken': False,         # True: what cannot be used (broken files, wrong sizes) is left out and listed; a file
                                  # that breaks during training is left out and counted

    # --- network ---
    'architecture': 'Unet',       # any of segmentation_models_pytorch: Unet, FPN, DeepLabV3Plus, Segformer...
    'encoder': 'auto',            # 'resnet34' on a GPU, 'tu-resnet10t' on a CPU; any smp or 'tu-...' timm name
    'encoder_weights': None,      # 'imagenet' downloads once and helps on photographs; None starts from scratch
    'decoder_channels': 'auto',   # width of the blocks of Unet, UnetPlusPlus, MAnet; 'auto': 256..16, half of that for
                                  # tu-resnet10t on a CPU (but 16 at the end for more than eight classes)
    'initial_weights': None,      # run folder or best.pt to start from: its network, on other data or classes

    # --- training ---
    'num_epochs': 'auto',         # passes over the images; 'auto': about 32,000 images, from 20 to 200 epochs;
                                  # on a CPU about 8,000, from 10 to 200 epochs; the demo 10, Dataset objects 20
    'batch_size': 8,              # images in one forward pass: what decides memory
    'accumulation_steps': 1,      # forward passes per step; effective batch = batch_size x accumulation_steps: that of
                                  # all processes together, which share the passes first, then batch_size
    'optimizer': 'AdamW',         # any of torch.optim except LBFGS, SparseAdam and Muon; SGD gets momentum
    'learning_rate': 'auto',      # peak; 'auto': 2e-3 x sqrt(effective batch / 8) for Adam... and RMSprop, at most
                                  # 0.01; for SGD 0.02 x (effective batch / 8), at most 0.1; others: torch's own default
    'weight_decay': 0.01,         # on weights of two or more dimensions, except those of norms and embeddings
    'momentum': 0.9,              # of SGD, in Nesterov's form
    'warmup_fraction': 0.02,      # share of all steps with a rising learning rate; then cosine to 1 % of the rate
    'grad_clip': 1.0,             # largest gradient norm, after unscaling; None: no clipping
    'loss': 'ce+dice',            # or 'ce', 'dice', 'focal', 'focal+dice', always one value per image
    'class_weights': 'multiclass',  # factors of the cross-entropy, one per class, or 'auto' from the pixel counts;
                                  # 'multiclass': 'auto' for more than two classes with loss=ce+dice where no image
                                  # comes several times (oversample_foreground), else None
    'oversample_foreground': 0.9,  # least share of an epoch that shows any class but 0: if fewer images do they come
                                  # again, augmented anew, rarer classes more often, in place of some of the others;
                                  # crops of these, and a third of the others, lie around it; 0: each once, anywhere
    'ema_decay': 'auto',          # moving average of the weights, which is what is validated; None: off; 'auto': over
                                  # 5 % of the run, 10,000 steps at most; off for Dataset objects given to train()
    'progressive_resizing': 'auto',  # share of the steps, the first ones, on images of half the size: learns faster;
                                  # 'auto': 0.18 for the default network on a CPU, not compiled, if images are
                                  # resized to 128 or more, else 0
    'early_stopping_patience': 20,  # epochs at full size without a better validation score, not counting the first
                                  # fifth of the run (40 epochs at most); None: never stop early
    'seed': 0,                    # of weights, split, order and augmentation

    # --- precision ---
    'use_amp': 'auto',            # True, False, 'auto': mixed precision where there are units for it, not on Apple GPUs
    'amp_dtype': 'auto',          # 'bfloat16', 'float16' (adds a gradient scaler), 'auto': bfloat16 where native
    'tf32_matmul_precision': 'high',  # float32 arithmetic on Ampere and later: 'highest' exact, 'high' and 'medium'
                                  # TF32 ('medium' on a CPU: bfloat16), None leaves PyTorch's own setting
    'keep_float32': None,         # name of a module that stays out of autocast: 'segmentation_head'
    'init_scale': 65536.0,        # float16 only: first loss scale,
    'growth_factor': 2.0,         # ... its rise after growth_interval sound steps,
    'backoff_factor': 0.5,        # ... its fall after an overflow,
    'growth_interval': 2000,      # ... in optimizer steps
    'max_bad_steps': 5,           # unsound steps in a row before precision steps down (to bfloat16 if native, float32);
                                  # of float16, which seeks its scale, those of a finite loss only below scale 1

    # --- speed and memory ---
    'device': 'auto',             # 'cuda', 'cuda:1', 'mps', 'cpu'; 'auto': the first of these that this machine has
    'compile_model': False,       # torch.compile: slow to start, often faster per step (measure: tune)
    'channels_last': 'auto',      # memory layout, faster for most convolutions: True (without effect on Apple GPUs),
                                  # False, 'auto': where it is faster, which exact float32 on a GPU is not
    'activation_checkpointing': False,  # recompute activations: less memory, about a third slower, same result
    'deterministic': False,       # repeatable GPU kernels, where they exist; slower (on a CPU runs repeat without it)

    # --- the run ---
    'run_dir': 'auto',            # folder for everything a run writes; 'auto': runs/<data>-<number>
    'resume': None,               # run folder to continue; 'auto': run_dir if given, else the newest run on this data
                                  # if it is not finished, else a new run
    'checkpoint_minutes': 10.0,   # last.pt is also written every so often inside an epoch
    'tensorboard': False,         # True: curves and predictions for TensorBoard too (pip install tensorboard)
}

# What the defaults do not say: the kinds of value a key takes ...
TYPES = {key: kinds.split() for kinds, keys in {
    'str': 'data size_policy augment architecture optimizer loss',
    'str auto': 'image_dtype encoder amp_dtype device run_dir',
    'str none': 'images masks image_pattern mask_pattern group_pattern encoder_weights initial_weights '
                'tf32_matmul_precision keep_float32 resume',
    'bool': 'skip_unpaired skip_broken compile_model activation_checkpointing deterministic tensorboard',
    'bool auto': 'cache_images channels_last mirror use_amp',
    'bool str': 'rescale_masks',
    'int': 'fold in_channels max_image_pixels batch_size accumulation_steps seed growth_interval max_bad_steps',
    'int auto': 'num_classes num_workers num_epochs',
    'int none': 'ignore_index early_stopping_patience',
    'int list auto': 'image_size',
    'float': 'val_fraction weight_decay momentum warmup_fraction init_scale growth_factor backoff_factor '
             'checkpoint_minutes oversample_foreground',
    'float auto': 'learning_rate progressive_resizing',
    'float none': 'grad_clip',
    'float auto none': 'ema_decay',
    'float list auto': 'mean std',
    'list none': 'class_names',
    'list auto': 'decoder_channels',
    'list str none': 'class_weights',
    'dict str none': 'mask_values'}.items() for key in keys.split()}
# ... the words it may be ...
CHOICES = {
    'architecture': ('Unet', 'UnetPlusPlus', 'MAnet', 'Linknet', 'FPN', 'PSPNet', 'PAN', 'DeepLabV3', 'DeepLabV3Plus',
                     'UPerNet', 'Segformer', 'DPT'),
    'rescale_masks': ('stretch',),
    'size_policy': ('resize', 'crop', 'pad'),
    'loss': ('ce', 'dice', 'focal', 'ce+dice', 'focal+dice'),
    'class_weights': ('auto', 'multiclass'),
    'amp_dtype': ('auto', 'bfloat16', 'float16'),
    'tf32_matmul_precision': ('highest', 'high', 'medium'),
    'image_dtype': ('auto', 'uint8', 'float32'),
}
# ... and the numbers: (lowest, highest), both allowed. Keys in ABOVE_ZERO must exceed their lowest.
RANGES = {
    'val_fraction': (0, 0.9), 'fold': (0, 999), 'num_classes': (2, 255), 'ignore_index': (-32768, 65535),
    'in_channels': (1, 1024),
    'image_size': (8, 65536), 'num_workers': (0, 256), 'max_image_pixels': (1, 10**12), 'num_epochs': (1, 10**6),
    'batch_size': (1, 65536), 'accumulation_steps': (1, 65536), 'learning_rate': (0, 100), 'weight_decay': (0, 10),
    'momentum': (0, 0.9999), 'warmup_fraction': (0, 0.9), 'grad_clip': (0, 1e9), 'ema_decay': (0, 0.99999),
    'early_stopping_patience': (1, 10**6), 'seed': (0, 2**32 - 1), 'init_scale': (1e-3, 2.0**40),
    'growth_factor': (1, 1000), 'backoff_factor': (0, 0.999), 'growth_interval': (1, 10**9), 'max_bad_steps': (1, 1000),
    'checkpoint_minutes': (0, 10**6), 'decoder_channels': (1, 4096), 'std': (0, 1e30), 'mean': (-1e30, 1e30),
    'class_weights': (0, 1e6), 'progressive_resizing': (0, 1), 'oversample_foreground': (0, 1),
}
ABOVE_ZERO = {'learning_rate', 'grad_clip', 'std', 'backoff_factor', 'growth_factor'}
LENGTHS = {'image_size': 2, 'decoder_channels': 5}   # of lists whose length is fixed
SHORT_NAMES = {'epochs': 'num_epochs', 'lr': 'learning_rate', 'batch': 'batch_size', 'size': 'image_size',
               'workers': 'num_workers', 'wd': 'weight_decay', 'patience': 'early_stopping_patience',
               'classes': 'num_classes', 'compile': 'compile_model', 'arch': 'architecture', 'out': 'run_dir',
               'o': 'run_dir'}
# What other trainers call it, one letter or one word -> what to type here, or why there is no such setting.
ELSEWHERE = {word: ours for ours, words in {
    'data': 'dataset dataset_dir data_dir data_root data_path',
    'images': 'img_dir image_dir images_dir imgs dir_img train_images x_train_dir',
    'masks': 'ann_dir mask_dir masks_dir label_dir labels_dir labels annotations dir_mask train_masks y_train_dir',
    'image_pattern': 'img_suffix image_suffix',
    'mask_pattern': 'seg_map_suffix mask_suffix label_suffix',
    'mask_values': 'reduce_zero_label class_map classes_map palette color_map',
    'class_names': 'codes names label_names labels_list',
    'num_classes': 'nc num_labels class_mode',
    'ignore_index': 'ignore_label void_label ignore_value',
    'val_fraction': 'val valid_pct val_percent val_size val_split validation validation_split test_size split_ratio',
    'image_size': 's scale imgsz img_size img_scale input_size input_shape crop_size patch_size roi_size resolution',
    'cache_images': 'cache cache_ram cache_rate',
    'num_workers': 'j nw n_jobs dataloader_num_workers',
    'augment': 'transform transforms augmentation augmentations multi_scale flipud mosaic mixup degrees',
    'mirror': 'fliplr flip_lr hflip horizontal_flip random_horizontal_flip random_flip do_mirroring',
    'architecture': 'model model_name net network',
    'encoder': 'backbone encoder_name',
    'encoder_weights': 'pretrained use_pretrained',
    'initial_weights is where train starts from; evaluate, predict and export are followed by the run itself':
        'weights load load_from model_name_or_path checkpoint ckpt finetune pretrained_weights',
    'num_epochs': 'e',
    'batch_size': 'b bs per_device_train_batch_size samples_per_gpu per_device_eval_batch_size',
    'accumulation_steps': 'accumulate accumulate_grad_batches gradient_accumulation_steps grad_accum',
    'optimizer': 'optim opt solver',
    'learning_rate': 'l lr0 lr_max base_lr max_lr initial_lr init_lr',
    'warmup_fraction': 'warmup warmup_steps warmup_epochs warmup_iters warmup_ratio num_warmup_steps',
    'grad_clip': 'clip clipnorm clip_grad clip_grad_norm gradient_clip_val max_grad_norm',
    'class_weights': 'pos_weight weight class_weight',
    'ema_decay': 'ema use_ema model_ema',
    'early_stopping_patience': 'early_stop early_stopping',
    'seed': 'seed_everything random_state random_seed',
    'tf32_matmul_precision': 'tf32 allow_tf32',
    'device': 'gpu gpu_id gpu_ids cuda use_cuda no_cuda cpu use_cpu accelerator',
    'activation_checkpointing': 'gradient_checkpointing grad_checkpointing use_checkpoint',
    'run_dir': 'work_dir project name output output_dir out_dir save_dir log_dir default_root_dir exp_name '
               'experiment dir_checkpoint',
    'resume': 'ckpt_path resume_from resume_from_checkpoint load_checkpoint auto_resume',
    'tensorboard': 'logger report_to log_with use_tensorboard',
    'type --preset debug': 'fast_dev_run dev_run dry_run overfit_batches',
    'type --preset PATH': 'config cfg config_file settings',
    'num_epochs counts passes over the images, not steps': 'max_steps max_iters max_iter max_iterations iterations '
                                                            'total_steps',
    'one GPU needs no word, several need torchrun --nproc_per_node=2 train_unet.py': 'gpus num_gpus n_gpus devices '
                                                                                     'num_nodes',
    'after the warm-up the rate always falls along a cosine': 'scheduler lr_scheduler lr_scheduler_type cos_lr lrf',
    'each epoch is validated, and saved unless it is short': 'eval_steps save_steps save_period save_interval interval '
                                                             'eval_interval val_check_interval validation_steps '
                                                             'check_val_every_n_epoch save_strategy',
    'the epoch with the best validation IoU is kept': 'metric metrics monitor save_best_only restore_best_weights',
    'a network of your own is given in Python: train(model=net)': 'dropout drop_rate activation bilinear freeze '
                                                                  'freeze_epochs freeze_encoder',
    'a loss of your own is given in Python: train(loss_fn=...)': 'criterion loss_function loss_func',
    'of your own are train_data=..., val_data=... in Python': 'train_dataset eval_dataset val_dataset train_loader '
                                                              'val_loader train_dataloader val_dataloader',
    'threshold, a word of predict': 'conf mask_threshold',
    'images follow the run without a key: predict runs/x photo.jpg': 'source input inputs i',
}.items() for word in words.split()}

# ===== config: presets, overrides, validation =========================================


class UserError(Exception):
    """Something the user can mend. `problems` is a list of lines; `title` heads the block main prints."""
    title = 'cannot start'

    def __init__(self, problems, title=None):
        self.title = title or self.title
        if isinstance(problems, str):     # torch raises a worker's error again with its traceback as the one argument
            told = problems.rpartition(f'{self.title}:\n')[2] if problems.startswith('Caught ') else ''
            problems = [line.strip() for line in told.splitlines()] or [problems]
        self.problems = list(problems)
        super().__init__(str(self))

    def __str__(self):
        return '\n'.join([f'{self.title}:', *('  ' + clean(line) for line in self.problems)])


class ConfigError(UserError):
    """Settings that cannot be used: every problem at once."""
    title = 'the config cannot be used'


class DataError(UserError):
    """Images or masks that cannot be used, each named."""
    title = 'the data cannot be used'


UNITED = '\0'                      # joins the paths of several mask files that make one mask; no path can hold it


def clean(text):
    """Text that is safe on one line: control characters (terminal escapes, new lines) become visible."""
    text = str(text).replace(UNITED, ' + ')
    return text if text.isprintable() else ''.join(
        c if c.isprintable() or unicodedata.category(c) == 'Zs' else repr(c)[1:-1] for c in text)


def letters_of(text):
    """The letters and digits of a name, in lower case."""
    return re.sub(r'[\W_]', '', str(text).lower().replace('+', 'plus'))


def did_you_mean(word, candidates, cutoff=0.6):
    """": did you mean 'x'?" or an empty string."""
    known = {letters_of(c): c for c in candidates}
    close = difflib.get_close_matches(letters_of(word), known, n=1, cutoff=cutoff)
    return f": did you mean '{known[close[0]]}'?" if close else ''


def key_meant(word, others=()):
    """What to type for a word that is no key, in the form of did_you_mean. others: what it may be meant for besides."""
    if re.search('(?i)token|secret|passw|webhook|(api|access)_?key', word):
        return ': no secret is kept here, as config.py and last.pt hold all settings'
    table, last = {letters_of(name): meant for name, meant in ELSEWHERE.items()}, word.rpartition('.')[2]
    if letters_of(word) not in table and len(last) > 1 and last not in ('name', 'weight', 'weights') and not others:
        word = last                                                    # trainer.max_steps, model.lr
    if meant := table.get(letters_of(word)):
        return f': {meant}' if ' ' in meant else f": did you mean '{meant}'?"
    return did_you_mean(word, ['preset', *TYPES, *SHORT_NAMES, *others], cutoff=0.75)


def as_typed(key, value, in_quotes=False):
    """key=value as a shell takes it: quoted if `in_quotes`, or if the value holds more than plain characters."""
    escaped = re.sub(r'([$`"\\])', r'\\\1', value.as_posix() if isinstance(value, Path) else str(value))
    return f'{key}="{escaped}"' if in_quotes or re.search(r'[^\w./,+-]', escaped) else f'{key}={escaped}'


def quoted(path):
    """A path in double quotes if it needs any, as Windows' cmd knows no single ones, and with / there too."""
    return as_typed('', Path(path)).removeprefix('=')


def command_line(*words):
    """What to type next: the script as it was called, then these words; in a notebook's cell the function."""
    if __name__ != '__main__' and running_shell():
        words = shlex.split(re.sub(r'\\([$`])', r'\1', ' '.join(words)))        # as_typed's, which shlex would keep
        verb = words.pop(0) if words and words[0] in COMMANDS else 'train'
        settings, paths = parse_overrides(words)
        typed = [*map(repr, paths), *(f'{key}={value!r}' for key, value in settings.items())]
        return f'train_unet.{verb}({", ".join(typed)})'
    name = Path(__file__).name
    script = sys.argv[0] if os.path.basename(sys.argv[0]) == name else name if os.path.isfile(name) else __file__
    uv = 'uv run' if re.search('(environments|archive|builds)-v', sys.prefix) else 'uv run python'     # of a project
    python = uv if 'UV' in os.environ else Path(sys.executable or 'python').name.removesuffix('.exe')
    return clean(' '.join([python, quoted(script), *words]))


def counted(number, noun):
    """'1 image', '2 images'"""
    return f'{number} {noun}{"s" * (number != 1)}'


SHORT = reprlib.Repr()             # cuts values off after so many items, letters and levels
SHORT.maxlist = SHORT.maxtuple = SHORT.maxdict = SHORT.maxset = 40
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 200
SHORT.maxlevel = 3


def shown(value):
    """The repr of a value, short enough for a message, whatever the value is."""
    try:
        return SHORT.repr(value)[:200]
    except ValueError:                                                 # Python refuses to print huge integers
        return 'a number of thousands of digits'


def in_words(error):
    """The message of an exception: short, on one line, without terminal colours. The type comes first, except where the
    message alone says enough."""
    plain = ' '.join(re.sub(r'\x1b\[[\d;]*m', '', str(error)).split())[:300]
    needs_no_type = type(error) in (OSError, ValueError, UnidentifiedImageError)
    return plain if plain and needs_no_type else f'{type(error).__name__}: {plain}'


def read_literal(source):
    """As ast.literal_eval, but raises ConfigError if a dict has a key twice (Python would silently keep the last)."""
    tree = ast.parse(source.strip(), mode='eval') if isinstance(source, str) else source
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = Counter((node, ast.unparse(key)) for node in dicts for key in node.keys if key)
    if twice := [key for (_, key), count in keys.items() if count > 1]:
        raise ConfigError(f'{shown(ast.unparse(tree))}: {", ".join(twice)} stands there twice; keep one')
    return ast.literal_eval(tree)


def parse_value(text, kinds=()):
    """'8' -> 8, '1e-3' -> 0.001, 'none' -> None, '512x384' -> [512, 384]; a name keeps its spelling."""
    if kinds[:1] == ['str']:
        return None if 'none' in kinds and text.lower() in ('none', 'null') else text
    words = {'none': None, 'null': None, 'true': True, 'false': False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r'\d{1,9}[xX]\d{1,9}', text):
        return [int(n) for n in text.lower().split('x')]
    try:
        return read_literal(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        is_list = kinds[:1] == ['list'] and re.search(r'[\[,]', text)   # class_names=[background,nucleus]
        inside = re.sub(r'^\((.*)\)$', r'\1', text.strip()).removeprefix('[').removesuffix(']')    # but: a (b)
        return [word.strip(' \'"') for word in inside.split(',')] if is_list else text


def parse_overrides(words):
    """['num_epochs=5', '--lr', '1e-3'] -> ({'num_epochs': 5, 'learning_rate': 0.001}, [all other words])."""
    overrides, others, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition('=')
        if word.startswith('--no-') and not equals:                    # --no-amp is amp=False
            name, equals, text = word[5:], '=', 'false'
        key = name.lstrip('-').replace('-', '_')
        key = SHORT_NAMES.get(key, key)
        kinds = ['str'] if key == 'preset' else TYPES.get(key, [])
        is_file = os.path.exists(word) or glob.glob(word)
        if re.match('--|-.', word) and not equals and not is_file:
            values = ('true', 'false', 'auto', *FOREIGN.get(key, ()), *CHOICES.get(key, ()))
            is_flag = kinds[:1] == ['bool'] or key in FLAGS or 'true' in FOREIGN.get(key, ())
            is_other = words and re.match(rf'--|-[A-Za-z]|({"|".join([*TYPES, *SHORT_NAMES])})=', words[0])
            is_value = words and (words[0].lower() in values if is_flag else not is_other)
            text = words.pop(0) if is_value else 'true' if is_flag or key == 'resume' else None
        elif not equals or '/' in name or is_file:
            text = None
        if text is None:
            others.append(word)
        else:
            overrides[key] = parse_value(text, kinds)
    return overrides, others


PRESETS = {path.stem: path for path in sorted((Path(__file__).resolve().parent / 'configs').glob('*.py'))}
PRESETS_THERE = ', '.join(PRESETS) or 'none, as configs/ is not beside the script'


def load_preset(name):
    """The literal dict of a preset: a name in configs/, a file or a run. Read, never executed. Raises ConfigError if
    there is no such file or it holds anything but `config = {literals}`."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name  # a Path, or a Result
    path = Path(str(name))
    try:
        path = PRESETS.get(str(name)) or Path(os.path.expanduser(path))
        path = path / 'config.py' if os.path.isfile(path / 'config.py') else path
        if path.exists() and not (path.is_file() and path.stat().st_size < 2**20):
            raise OSError('not a file of less than 1 MiB')             # reading a pipe or /dev/zero would never end
        text = path.read_text(encoding='utf-8-sig')
    except (OSError, ValueError) as error:
        hint = '; settings are given as train(**settings);' if isinstance(name, dict) else did_you_mean(name, PRESETS)
        hint = f'; if it holds the data it is {as_typed("data", path)};' if os.path.isdir(path) else hint
        raise ConfigError(f'preset={shown(name)}: {path} cannot be read: {getattr(error, "strerror", None) or error}'
                          f'{hint or ";"} there are {PRESETS_THERE}, or the path of a .py file') from None
    try:
        module = ast.parse(text)
        [assignment] = module.body[ast.get_docstring(module) is not None:]
        config = read_literal(assignment.value)
        if [target.id for target in assignment.targets] != ['config'] or not isinstance(config, dict):
            raise ValueError
    except SyntaxError as error:
        raise ConfigError(f'preset {path}, line {error.lineno}: not Python: {error.msg}') from None
    except (AttributeError, ValueError, TypeError, RecursionError, MemoryError):
        raise ConfigError(f'preset {path}: must hold config = {{...}} once and nothing else, with literals (numbers, '
                          'strings, lists, dicts); it is read, not executed') from None
    return config


OFF, ON = {'use_amp': False}, {'use_amp': True}
FP16, BF16 = {'amp_dtype': 'float16'}, {'amp_dtype': 'bfloat16'}
PRECISIONS = {**dict.fromkeys(['32', '32-true', 'fp32', 'float32', 'no', 'false'], OFF),
              **dict.fromkeys(['16', '16-mixed', 'fp16', 'float16'], ON | FP16),
              **dict.fromkeys(['bf16', 'bf16-mixed', 'bfloat16'], ON | BF16)}
FOREIGN = {   # words of other trainers: key -> what each value means in ours
    **dict.fromkeys(['precision', 'precision_type'], PRECISIONS),
    **dict.fromkeys(['mixed_precision', 'amp', 'training.mixed_precision.enabled'], PRECISIONS | {'true': ON}),
    'training.mixed_precision.dtype': {'fp16': FP16, 'float16': FP16, 'bf16': BF16, 'bfloat16': BF16},
    'fp16': {'true': ON | FP16, 'false': OFF},
    'bf16': {'true': ON | BF16, 'false': OFF},
}


def translate(settings, notes):
    """Settings under any of their names -> (settings under the names of CONFIG, problems such as contradictions). Adds
    a line to `notes` for each name of another trainer."""
    own, typed, problems = {}, {}, []
    as_word = lambda value: shown(value).strip("'\"").lower()
    others = {'fp16': 'bfloat16', 'bf16': 'float16'}
    refused = {key for key in others if as_word(settings.get(key)) == 'false'}
    for key in sorted(settings, key=lambda key: (key in FOREIGN, key in refused)):     # own names first
        if key in refused and as_word(own.get('amp_dtype')) == others[key]:
            continue                                                   # bf16=True fp16=False is one wish, not two
        value, name = settings[key], SHORT_NAMES.get(key, key)
        said = f'{key}={shown(value)}'
        meant = FOREIGN[key].get(as_word(value), {}) if key in FOREIGN else {name: value}
        if not meant:
            problems.append(f'{said}: choose from {", ".join(FOREIGN[key])}')
        elif name in own:
            problems.append(f'{said}: {name} is there too, under another name; keep one')
        for ours, wish in meant.items():
            if key in FOREIGN:
                notes.append(f'{key}={value} is understood as {ours}={wish!r}')
                if as_word(own.get(ours, 'auto')) not in ('auto', as_word(wish)):
                    problems.append(f'{typed[ours]} and {said} contradict each other: keep one')
            own[ours], typed[ours] = wish, said
    return own, problems


def resolve_config(preset=None, overrides=None, base=None, found=(), words=()):
    """CONFIG (or `base`), overridden by the preset, then by the overrides -> (config, sources, notes).

    `sources` says for each key where its value came from; `notes` are translations to be told to the user.
    Raises ConfigError with every problem at once, those already `found` among them. `words`: what the command takes
    besides settings, offered for an unknown key that resembles none.
    """
    config, sources, notes, problems = {}, dict.fromkeys(TYPES, 'default'), [], [*found]
    layers = [('default', base or CONFIG)]
    try:
        if preset is not None:
            layers.append((f"preset '{preset}'", load_preset(preset)))
    except ConfigError as error:
        problems += error.problems
    for origin, settings in [*layers, ('you', overrides or {})]:
        settings, contradictions = translate(settings, notes)
        problems += contradictions
        for key, value in settings.items():
            if key in TYPES:
                config[key], sources[key] = value, origin
                continue
            name = shown(key).strip("'")
            hint = key_meant(name) or did_you_mean(name, words, cutoff=0.75) or ': the keys are those of CONFIG'
            if verbs := [verb for verb, words in OWN_WORDS.items() if key in words]:
                hint = f': it is a word of {" and ".join(verbs)}'
            problems.append(f'unknown key {shown(key)}{hint}')
    problems += validate_config(config)
    lacking = TYPES.keys() - config.keys()                             # somebody deleted a line of CONFIG, or mistyped
    told = {SHORT_NAMES.get(key, key) for key in re.findall(r"did you mean '(\w+)'", ' '.join(problems))}
    problems += [f'CONFIG has no {key!r}: put its line back' for key in sorted(lacking - told)]
    config |= dict.fromkeys(lacking)
    config |= {key: os.path.expanduser(config[key]) for key in ('run_dir', 'resume', 'augment')
               if isinstance(config[key], str)}
    problems += check_names(config)
    if problems and ('smp' in globals() or NAMES.items() <= config.items()):   # else main checks again, names as well
        given = [] if preset is None else [f'preset {str(preset)!r}']
        given += [counted(len(overrides), 'override')] if overrides else []
        where = f' ({" + ".join(given)})' if given else ''
        raise ConfigError(problems, f'{counted(len(problems), "problem")} in the config{where}')
    return config, sources, notes


SYNONYMS = {('loss', 'auto'): 'ce+dice', ('amp_dtype', 'fp16'): 'float16', ('amp_dtype', 'bf16'): 'bfloat16',
            ('resume', 'true'): 'auto', ('resume', 'false'): None,
            ('device', 'gpu'): 'cuda',
            **{('device', str(number)): f'cuda:{number}' for number in range(16)}}


def validate_config(config):
    """Types, choices, ranges -> list of problems. Normalises values in place: plain types, lists, floats, spelling."""
    problems = []
    plain = lambda value: value.tolist() if getattr(value, 'ndim', None) == 0 else value   # NumPy's numbers
    for key, value in config.items():
        kinds = TYPES.get(key, [])
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if key in ('device', 'amp_dtype') and type(value).__module__ == 'torch':       # torch.bfloat16
            value = str(value).removeprefix('torch.')
        value = value.tolist() if hasattr(value, 'tolist') else value  # NumPy
        if isinstance(value, str) and {'list', 'dict'} & {*kinds}:     # '384x512', or a line that was printed
            value = parse_value(value, kinds)
        value = [*map(plain, value)] if isinstance(value, (list, tuple)) else value
        value = {plain(code): plain(to) for code, to in value.items()} if isinstance(value, dict) else value
        value = SYNONYMS.get((key, shown(value).strip("'").lower()), value)
        if isinstance(value, str):                                     # unet is Unet
            words = {word.lower(): word for word in CHOICES.get(key, ())}
            if 'auto' in kinds:
                words['auto'] = 'auto'
            value = value.lower() if key in ('device', 'encoder') else words.get(value.lower(), value)
        if type(value) is int and 'float' in kinds:
            value = float(value) if abs(value) < 10**300 else math.inf
        elif type(value) is float and 'int' in kinds and value.is_integer():
            value = int(value)                                         # 2e8 pixels
        config[key], fault = value, find_fault(key, value)
        if fault:
            problems.append(f'{key}={shown(value)}: {fault}')
        elif 'list' in kinds and type(value) in (int, float):          # 512 is 512x512, one mean is of all channels
            config[key] = [value] * LENGTHS.get(key, 1)
    return problems


NAMES = {'encoder': 'auto', 'encoder_weights': None, 'optimizer': 'AdamW', 'augment': 'default'}


def check_names(config):
    """Problems with the values of NAMES. Before the libraries that know the names are loaded it finds none."""
    if 'smp' not in globals() or any(find_fault(key, config[key]) for key in NAMES):
        return []
    encoder, encoders = config['encoder'].partition('.')[0], {'auto': {}}          # timm: NAME.WEIGHTS
    if encoder != 'auto':                                              # importing timm or smp takes seconds
        is_older = re.match('timm-', encoder) or encoder.startswith('tu-') and timm.is_model(encoder[3:])  # not listed
        encoders = smp.encoders.encoders | {f'tu-{name}': {} for name in timm.list_models()}
        encoders = {encoder: {}} | encoders if is_older else encoders
    known = {'encoder': encoders, 'optimizer': find_optimizers(), 'augment': ('none', 'default', 'strong'),
             'encoder_weights': encoders.get(encoder, {}).get('pretrained_settings', ['imagenet'])}    # timm: no others
    typed = config | {'encoder': encoder, 'optimizer': config['optimizer'].lower()}
    return [f'{key}={config[key]!r}: there is no such {"name or file" if key == "augment" else "name"}'
            f'{did_you_mean(config[key], words) or ";"} there are {", ".join(shorten(words, 12)) or "none"}'
            for key, words in known.items()
            if typed[key] not in (None, *words) and not (key == 'augment' and os.path.isfile(typed[key]))]


MOST_CLASSES = 64  # masks with more values or colours hold noise around those of classes, or ids of objects
COLOUR = 1 << 24   # a colour mask holds COLOUR + 0xRRGGBB, so that colours and grey values cannot be confused


def parse_mask_values(mask_values):
    """{255: 1, '#ff0000': 2} -> {255: 1, COLOUR + 0xff0000: 2}; '>127' or 'alpha' -> 127; '<128' -> -128; 'nonzero' ->
    0; None -> None. Raises ValueError, saying what to type, for other texts and dicts."""
    if isinstance(mask_values, str):
        word = {'nonzero': '>0', 'alpha': '>127'}.get(mask_values, mask_values)
        match = re.fullmatch(r'>\s*(\d+)|<\s*([1-9]\d*)', word)
        if not match:
            raise ValueError('type a dict such as mask_values="{255: 1}", with the quotes, or ">127", "<128", nonzero, '
                             'alpha')
        return int(match[1]) if match[1] else -int(match[2])
    if not isinstance(mask_values, dict):
        return None                                                    # other types are reported elsewhere
    codes = {}
    for value, class_id in mask_values.items():
        is_colour = isinstance(value, str) and re.fullmatch(r'#[0-9a-fA-F]{6}', value)
        if type(class_id) is not int or not 0 <= class_id <= 255 \
                or not is_colour and (type(value) is not int or value >= COLOUR):
            raise ValueError(f"{shown(value)}: {shown(class_id)} must map a whole number, or a colour such as "
                             "'#ff0000', to a class 0..254, or 255 for ignored")
        codes[COLOUR + int(value[1:], 16) if is_colour else value] = class_id
    if not codes:
        raise ValueError('is empty; name at least one value, as in {255: 1}')
    return codes


COMMANDS = ('train', 'check', 'tune', 'evaluate', 'predict', 'export')
VERBS = {verb: f": did you mean '{ours}'?" for ours, verbs in {      # of other trainers
    'train': 'fit run', 'evaluate': 'val validate valid test eval score', 'export': 'convert',
    'predict': 'infer inference detect segment'}.items() for verb in verbs.split()}
NEEDS = {'evaluate': 'runs/x', 'predict': 'runs/x photo.jpg', 'export': 'runs/x'}     # paths that must follow
# Words of single commands, which are not in CONFIG.
OWN_WORDS = {'evaluate': ('split', 'tta'), 'predict': ('save', 'tta', 'threshold', 'skip_existing'),
             'export': ('format', 'half')}
FLAGS = ('tta', 'half', 'skip_existing')                               # those of them that are True or False
TRAINING_KEYS = set('augment mirror num_epochs accumulation_steps optimizer learning_rate weight_decay momentum '
                    'warmup_fraction grad_clip loss class_weights oversample_foreground ema_decay progressive_resizing '
                    'early_stopping_patience init_scale growth_factor backoff_factor growth_interval max_bad_steps '
                    'initial_weights compile_model activation_checkpointing resume checkpoint_minutes tensorboard '
                    'encoder_weights deterministic'.split())
DATA_KEYS = set('data images masks image_pattern mask_pattern skip_unpaired rescale_masks val_fraction fold '
                'group_pattern class_names mask_values ignore_index seed'.split())
IDLE = {'tune': {'resume'}, 'evaluate': {'preset', 'run_dir', *TRAINING_KEYS},     # settings refused as useless
        'predict': {'preset', 'run_dir', *TRAINING_KEYS, *DATA_KEYS}, 'export': {'preset', *TYPES, *FOREIGN}}
Command = namedtuple('Command', 'verb paths preset overrides own output')   # what was typed


def idle_settings(verb, overrides):
    """Problems with settings that a command would not use."""
    return [f'{key}={shown(value)}: {verb} has no use for it' for key, value in overrides.items()
            if SHORT_NAMES.get(key, key) in IDLE.get(verb, ())]


def wrong_flags(words):
    """Problems with FLAGS that are given something else than True or False."""
    return [f'{key}={shown(value)}: must be True or False' for key, value in words.items()
            if key in FLAGS and 'bool' not in type(value).__name__]                    # or of NumPy


def parse_command(argv):
    """The command line -> Command, its settings validated; --help ends here. Raises ConfigError; needs no torch."""
    if {'-h', '--help', 'help'} & set(argv):
        print((__doc__ or '').split('The file, top to bottom')[0].rstrip())         # python -OO leaves none
        source = Path(__file__).read_text(encoding='utf-8')
        settings = source[source.index("'data':", source.index('CONFIG = {')) - 4:].partition('\n}\n')[0]
        print('\nSettings, with their defaults:\n')
        print(re.sub(r"(?m)^    '(\w+)': (.*?),(?=  |$)", r'    \1=\2    ', settings))
        print('\nOf one command alone:', '; '.join(f'{verb} {", ".join(own)}' for verb, own in OWN_WORDS.items()))
        print(f'\nPresets (--preset NAME): {PRESETS_THERE}', flush=True)
        sys.exit(0)
    words, problems = list(argv), []
    verb = words.pop(0) if words and words[0] in COMMANDS else 'train'
    overrides, paths = parse_overrides(words)
    output = overrides.pop('run_dir', None) if verb in ('predict', 'export') else None
    own_words = OWN_WORDS.get(verb, ())
    own = {key: overrides.pop(key) for key in own_words if key in overrides}
    needed, extra = NEEDS.get(verb, ''), {'evaluate': 'data', 'export': 'format'}.get(verb)
    if len(paths) < len(needed.split()):
        what = 'a run folder' if extra else 'a run folder and images'
        problems.append(f'{verb} needs {what}, as in  {command_line(verb, needed)}')
    is_run = lambda word: word.endswith('.pt') or os.path.isfile(os.path.join(word, 'config.py'))
    if runs := [word for word in paths[1:] if needed and is_run(word) and not is_run(paths[0])]:
        others = [as_typed(extra, Path(word)) if extra else quoted(word) for word in paths if word not in runs]
        problems.append(f'{paths[0]!r}: the run comes first: {command_line(verb, quoted(runs[0]), *others)}')
    problems += [f'{word!r}: {verb} takes one run; if that is its {extra} type {as_typed(extra, word)}'
                 for word in paths[1:] if extra and not word.startswith('-') and not runs]
    problems += idle_settings(verb, overrides)
    preset = overrides.pop('preset', None)
    for word in [word for word in paths if not needed or word.startswith('-') and not os.path.exists(word)]:
        key = word.lstrip('-').replace('-', '_')
        if word in COMMANDS:
            hint = ': the command comes first'
        elif os.path.exists(word):
            is_preset = word.endswith('.py') or is_run(word) and verb == 'tune'
            place = 'demo/' if Path(word) == Path('demo') else Path(word)      # which data=demo is not
            place = place.parent if is_preset and word.endswith('.pt') else place
            hint = '; type ' + as_typed('preset' if is_preset else 'resume' if is_run(word) else 'data', place)
            if is_run(word) and verb == 'train':
                hint += ', or evaluate, predict or export before it'
            if re.search(r'(?i)\.(png|jpe?g|tiff?|bmp|gif|webp)$', word):
                hint = f'; {command_line("predict", "RUN", quoted(word))} finds its mask'
        elif key in {'preset', *CONFIG, *SHORT_NAMES, *own_words}:
            hint = f'; type {key}=VALUE'
        else:
            hint = VERBS.get(word, '') or key_meant(key, COMMANDS) or '; type KEY=VALUE'
        problems.append(f'{word!r} is no command and no key=value{hint}')
    problems += wrong_flags(own)
    resolve_config(preset, overrides, found=problems, words=own_words)
    return Command(verb, paths, preset, overrides, own, output)


EXAMPLES = {'class_names': '[background,nucleus]', 'class_weights': '[1,5]', 'image_pattern': '{stem}.jpg',
            'mask_pattern': '{stem}_label.png', 'mask_values': '{255: 1}', 'device': 'cuda:0', 'encoder': 'resnet34',
            'image_size': '384x512'}
FORMS = {'device': r'auto|cpu|mps|cuda(:\d+)?', 'encoder': r'[\w.-]+',             # no hub address, no path
         'image_pattern': r'[^{}\0]*{stem}[^{}\0]*', 'mask_pattern': r'[^{}\0]*{stem}[^{}\0]*'}
OWN_HINTS = {'loss': '; a function goes into loss_fn', 'data': '; Datasets go into train_data and val_data',
             'optimizer': '; its settings are learning_rate, weight_decay and momentum',
             'augment': "; a pipeline is saved, A.save(pipeline, 'my.json'), and named; 'none' is none"}


def find_fault(key, value):
    """What is wrong with the value of one key, or with one number of its list; None if nothing is."""
    kinds, is_text, usual = TYPES.get(key, []), isinstance(value, str), CONFIG.get(key)
    default = f' ({usual!r} is the default)' if usual is not value and isinstance(usual, (str, int, float)) else ''
    default = f' (as in {as_typed(key, EXAMPLES[key])})' if key in EXAMPLES else default
    if value is None and 'none' in kinds or is_text and value == 'auto' and 'auto' in kinds:
        return None
    if type(value).__name__ not in kinds:
        names = {'none': 'None', 'auto': "'auto'", 'list': 'a list', 'dict': 'a dict', 'str': 'a string',
                 'int': 'a whole number', 'float': 'a number', 'bool': 'True or False'}
        return f'must be {" or ".join(names[kind] for kind in kinds)}{default}{OWN_HINTS.get(key, "")}'
    if key == 'amp_dtype' and '32' in value:
        return 'float32 is use_amp=False'
    if is_text and key in CHOICES and value not in CHOICES[key]:
        words = ['True', 'False', *CHOICES[key]] if 'bool' in kinds else CHOICES[key]
        further = f' or a list{default}' if 'list' in kinds else ''
        return f'choose from {", ".join(words)}{further}{did_you_mean(value, CHOICES[key])}'
    if key == 'device' and ',' in value:
        return 'a process has one device; for several type torchrun --nproc_per_node=2 train_unet.py'
    if is_text and not re.fullmatch(FORMS.get(key, r'[^\0]+'), value):
        return f'has not the right form{default}'
    try:
        {'mask_values': parse_mask_values, 'group_pattern': re.compile}.get(key, bool)(value)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        return f'not a regular expression: {error}' if key == 'group_pattern' else str(error)
    if key == 'class_names' and not all(isinstance(name, str) for name in value):
        return f'must be a list of texts{default}'
    if key not in RANGES or is_text:
        return None
    low, high = RANGES[key]
    numbers = value if isinstance(value, list) else [value]
    number = (int, float) if 'float' in kinds or key == 'class_weights' else int
    has_wrong_length = isinstance(value, list) and (len(value) != LENGTHS[key] if key in LENGTHS else not value)
    if has_wrong_length or not all(isinstance(n, number) and not isinstance(n, bool) for n in numbers):
        return f'must hold {LENGTHS.get(key, "one or more")} {"whole " * (number is int)}numbers only{default}'
    if key == 'class_weights' and not any(value):
        return 'one of them must be above 0'
    if all(low < n <= high if key in ABOVE_ZERO else low <= n <= high for n in numbers):
        return None
    least, more = 'above' if key in ABOVE_ZERO else 'at least', ', or None' if 'none' in kinds else ''
    more = ', the background counted' if key == 'num_classes' else more
    return f'must be {least} {low} and at most {high:g}{more}{default}'


def has_other_machines():
    """Whether torchrun started processes on other machines too. Of one machine it ends all if one fails."""
    return 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('LOCAL_WORLD_SIZE') != os.environ.get('WORLD_SIZE')


# --help and wrong settings are answered before torch takes its seconds to load (of several machines later: meet_late)
if __name__ == '__main__' and not has_other_machines():
    try:
        os.getcwd()
        parse_command(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:        # --help | head: the rest has no reader; Python's flush at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except FileNotFoundError:      # MKL would end the program: Cannot load libtorch_cpu.so
        print('the current folder was deleted: change to another', file=sys.stderr)
        sys.exit(2)

os.environ.setdefault('NO_ALBUMENTATIONS_UPDATE', '1')   # else importing it asks a server for a newer version
if __name__ == '__main__' and 'IPython' not in sys.modules:    # a notebook's may not be there for what it starts
    os.environ.pop('MPLBACKEND', None)


class ImportedWhenUsed:
    """A module that is imported at its first use, which with a network and data of your own may never come."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        try:
            return getattr(importlib.import_module(self.name), attribute)
        except (ImportError, RuntimeError, OSError, ValueError) as error:      # torchvision of another torch, or NumPy
            raise UserError(f'{error}: type  pip install -r requirements.txt') from None


try:
    import cv2
    import numpy as np
    from PIL import Image, ImageDraw, ImageFile, ImageFont, ImageOps, PngImagePlugin, UnidentifiedImageError
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import torch.utils.checkpoint
    from torch import nn
    from torch.utils import _pytree as pytree
    from tqdm.auto import tqdm
    A, smp, filelock = map(ImportedWhenUsed, ('albumentations', 'segmentation_models_pytorch', 'filelock'))
    safetensors, tifffile, timm, yaml = map(ImportedWhenUsed, ('safetensors', 'tifffile', 'timm', 'yaml'))
except (ImportError, AttributeError, OSError, ValueError, KeyboardInterrupt) as error:     # two OpenCVs, no DLL, NumPy
    if __name__ != '__main__':
        raise
    is_opencv = re.search("libGL|(?<!named ')cv2", str(error))         # another one is, or was, installed beside it
    what = '--force-reinstall opencv-python-headless' if is_opencv else '-r requirements.txt'
    sys.exit(130 if isinstance(error, KeyboardInterrupt) else f'{error}: type  pip install {what}')

log = logging.getLogger('train_unet')
log.setLevel(log.level or logging.INFO)
log.propagate = False                                                  # Colab's root logger would write each line again
logging.getLogger('PIL').addHandler(logging.NullHandler())             # it reports TIFFs that tifffile reads instead
warnings.filterwarnings('ignore', 'Palette images with Transparency')  # to lose transparency is meant
warnings.filterwarnings('ignore', 'Grad strides do not match')         # of 1x1 convolutions in channels_last, under DDP
logging.getLogger('timm.models._builder').setLevel(logging.ERROR)      # it lists weights of the classifier's head
logging.getLogger('tifffile').setLevel(logging.CRITICAL)               # what matters is raised, with the file's name

# ===== runtime: what the machine has, and the precision that follows from it ==========


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What the choice of a precision must know of a device. `units`: the dtypes it multiplies natively, or 'tf32'."""
    kind: str                      # 'cuda', 'mps' or 'cpu'
    name: str
    capability: tuple = (0, 0)     # CUDA compute capability
    units: frozenset = frozenset()
    memory: int = 0                # bytes

    def describe(self):
        extra = ', compute capability %d.%d' % self.capability if self.kind == 'cuda' else ''
        return f'{self.name}{extra}, {self.memory / 2**30:.0f} GiB{" free" * (self.kind == "cpu")}'


def cuda_units(name, capability):
    """Dtypes an NVIDIA card multiplies in hardware.

    Tensor Cores came with 7.0 (float16) and learnt bfloat16 and TF32 with 8.0 (CUDA C++ Programming Guide,
    compute capabilities). The 7.5 cards without them are the GTX 16xx, MX450/550 and the small T and Quadro T
    boards. torch.cuda.is_bf16_supported() also counts emulation, so it is not asked.
    """
    if capability >= (8, 0):
        return frozenset({'bfloat16', 'float16', 'tf32'})
    small = re.search(r'GTX 16|MX[45]50|\bT(400|500|550|600|1000|1200|2000)\b', name)
    return frozenset({'float16'}) if capability >= (7, 0) and not small else frozenset()


def cpu_units():
    """Dtypes this CPU trains in by its hardware: AMX or AVX512-BF16 give bfloat16, AMX-FP16 float16. (Not AVX512-FP16:
    gradients of convolutions took 80 times as long there as in float32, with torch 2.15; nor bfloat16 of ARM's: for
    those gradients oneDNN has its unoptimised reference alone, by its cpu_convolution_list.cpp.)"""
    if not torch.backends.mkldnn.is_available():                       # only oneDNN makes use of these units
        return frozenset()
    flags = {name for name, there in getattr(torch.cpu, 'get_capabilities', dict)().items() if there is True}
    with contextlib.suppress(OSError):
        flags |= set(Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')[:20000].split())
    marks = {'bfloat16': {'avx512_bf16', 'amx_bf16'}, 'float16': {'amx_fp16'}}
    return frozenset(dtype for dtype, names in marks.items() if flags & names)


def choose_device(wish):
    """'auto' -> the first of cuda, mps, cpu that is there; a named one that is not there is a ConfigError."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [f'cuda:{number}' for number in range(gpus)]
    found += ['mps', 'cpu'] if torch.backends.mps.is_available() else ['cpu']
    kinds = [name.partition(':')[0] for name in found]
    if wish not in ('auto', *kinds, *found):
        raise ConfigError(f'device={wish!r}: this machine has only {", ".join(found)}; type device=auto')
    return torch.device(kinds[0] if wish == 'auto' else wish)


def set_up_device(device):
    """Limit threads and memory to what this process may use. ConfigError for a GPU that cannot be used: this torch has
    no kernels for it, or other processes hold its memory."""
    if torch.get_num_threads() > cpu_quota():                          # threads beyond it wait for each other
        torch.set_num_threads(cpu_quota())
    if device.type == 'mps' and 'PYTORCH_MPS_HIGH_WATERMARK_RATIO' not in os.environ:
        torch.mps.set_per_process_memory_fraction(1.0)                 # at its default, 1.7, it swaps without a word
    try:
        if device.type == 'cuda':
            with torch.cuda.device(device):
                image = torch.zeros(1, 1, 8, 8, device=device).add_(1)
                F.conv2d(image, image[..., :3, :3])                    # cuDNN may support fewer GPUs than torch
                if sys.platform == 'win32' or 'microsoft' in platform.release().lower():       # or WSL
                    free, total = torch.cuda.mem_get_info()            # beyond it the driver swaps without a word
                    share = (free + torch.cuda.memory_reserved()) / total
                    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    except RuntimeError as error:
        raise ConfigError(f'device={device}: cannot be used ({in_words(error)}): if others hold its memory (nvidia-smi '
                          'shows them) end them, if torch or cuDNN has no kernels for it install a build of torch '
                          'that has some (pytorch.org/get-started), or type device=cpu') from None


World = namedtuple('World', 'rank size')   # which process this is, and of how many
GONE = '(closed|reset) by peer|Broken pipe'    # gloo's words where another process has ended


def world():
    """(0, 1) unless there is a group of several processes, as torchrun starts them."""
    several = dist.is_available() and dist.is_initialized()
    return World(dist.get_rank(), dist.get_world_size()) if several else World(0, 1)


def is_follower():
    """Whether torchrun started this process beside a first one. A RANK alone is left over from something else."""
    return (os.environ.get('WORLD_SIZE') or '1') != '1' and os.environ.get('RANK', '0') != '0'


def processes_started(config):
    """How many processes torchrun started. However many they are, the effective batch stays that of the config, of
    which each takes an equal share; ConfigError if it cannot be shared evenly."""
    text = os.environ.get('WORLD_SIZE', '').strip() or '1'
    if not text.isdecimal():
        raise ConfigError(f'WORLD_SIZE={shown(text)} is in the environment: no number of processes; unset it')
    count = max(world().size, int(text))
    effective = config['batch_size'] * config['accumulation_steps']
    if count > 1 and (effective % count or effective < 2 * count):
        raise ConfigError(f'{count} processes cannot share an effective batch of {effective} images evenly, at least '
                          'two for each: start a number that divides it, or type another batch_size; if you started '
                          'one alone unset WORLD_SIZE')
    return count


def join_processes(config):
    """Under torchrun, meet the other processes -> the device of this one."""
    count, device = processes_started(config), choose_device(config['device'])
    if count == 1:
        if (tasks := os.environ.get('SLURM_STEP_NUM_TASKS', '1')) != '1' and os.environ.get('SLURM_PROCID') == '0':
            warn(f'srun started {tasks} tasks, and each of them trains a run of its own; README has the line with '
                 'torchrun for one run on several GPUs')
        return device
    if device.type == 'cuda':
        gpus = torch.cuda.device_count()
        rank = world().rank or int(os.environ.get('RANK') or 0)        # no LOCAL_RANK: srun, or a group of the user's
        local = int(os.environ.get('LOCAL_RANK') or rank % gpus)
        if local >= gpus:
            raise ConfigError(f'a process too many: each takes a GPU of its own, of which this machine shows {gpus}; '
                              f'start {gpus} here (torchrun --nproc-per-node={gpus}), or type device=cpu')
        device = torch.device('cuda', local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        importlib.import_module('torch.distributed.nn.functional')     # later, its defaults would keep the group alive
        has_nccl = device.type == 'cuda' and dist.is_nccl_available()      # Windows has none; gloo takes all tensors
        backend = 'cpu:gloo,cuda:nccl' if has_nccl else 'gloo'         # gloo: objects, without a wait for GPUs
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(hours=1))
        except (ValueError, RuntimeError) as error:                    # the latter: of a port that is in use
            if 'TORCHELASTIC_RUN_ID' in os.environ:                    # another process has ended
                raise
            raise ConfigError(f'WORLD_SIZE={count} is in the environment, but by what torchrun sets beside it no '
                              f'processes meet ({in_words(error)}): start with torchrun, or unset WORLD_SIZE') from None
        atexit.unregister(meet_late)                                   # of a try before, whose error was caught
        if not has_nccl:
            atexit.register(leave_processes)
    return device


def meet_late():
    """Before a process ends that has not met the others: those of another machine, whose torchrun is not told of this
    end, would wait for it in join_processes, for an hour."""
    atexit.unregister(meet_late)
    if has_other_machines() and not dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):            # if they do not come either
            dist.init_process_group('cpu:gloo', timeout=datetime.timedelta(minutes=2))
        leave_processes()


def leave_processes():
    """At exit, else gloo's threads abort the process. With NCCL not after an error, as it may wait for the others."""
    if world().size > 1:
        dist.destroy_process_group()
        gc.collect()                                                   # cycles of an earlier training hold it too


def from_first(make):
    """make() on the first process -> its answer, on all. UserError and OSError are raised on all; any other error
    leaves the others waiting."""
    try:
        answer = [None if world().rank else make()]
    except (UserError, OSError) as error:
        answer = [error]
    if world().size > 1:
        dist.broadcast_object_list(answer)
    if isinstance(answer[0], (UserError, OSError)):
        raise answer[0]
    return answer[0]


def from_all(value):
    """The values of all processes as a list."""
    values = [value] * world().size
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def detect_hardware(device):
    """Read what torch reports of a device."""
    if device.type == 'cuda':
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        units = cuda_units(properties.name, capability)
        if torch.version.hip:                                          # AMD: capability means something else, and torch
            native = re.match('gfx(908|90a|9[45]|1[12])', properties.gcnArchName)      # says yes of those that emulate
            units = frozenset({'float16', 'bfloat16'} if native else {'float16'})
        return Hardware('cuda', properties.name, capability, units, properties.total_memory)
    if device.type == 'mps':
        units = frozenset({'float16'} if torch.__version__ >= (2, 8) else ())      # before, its scaler needs float64
        return Hardware('mps', 'Apple GPU', units=units, memory=torch.mps.recommended_max_memory())
    name = f'CPU with {counted(torch.get_num_threads(), "thread")}'
    return Hardware('cpu', name, units=cpu_units(), memory=free_memory())


def common_hardware(hardware):
    """The hardware with only the units that all processes have, for one precision. ConfigError if some have no GPU."""
    kinds, units = zip(*from_all((hardware.kind, hardware.units)))
    if len({*kinds}) > 1:
        raise ConfigError(f'the processes found different devices ({", ".join(sorted({*kinds}))}): find out why some '
                          'have no GPU, or type device=cpu')
    return dataclasses.replace(hardware, units=frozenset.intersection(*units))


def cpu_quota():
    """Cores that a container may keep busy (docker --cpus, Kubernetes), though it sees all of them; else inf."""
    for names in ['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']:       # cgroup v2, and v1
        with contextlib.suppress(OSError, ValueError):                 # 'max' is no number
            quota, period = map(int, ' '.join(Path('/sys/fs/cgroup', name).read_text() for name in names).split())
            return max(1, quota // period) if quota > 0 else math.inf  # v1 has -1 for none
    return math.inf


def num_cores():
    """CPU cores for this process: those it may run on, shared with the others that torchrun started here."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota()) // processes_here())


def processes_here():
    """How many of the processes run on this machine and share its cores and memory. torchrun tells; of a group that the
    user's own script made it is all of them, or under srun an equal share for each machine."""
    machines = int(os.environ.get('SLURM_STEP_NUM_NODES') or 1)
    return int(os.environ.get('LOCAL_WORLD_SIZE') or math.ceil(world().size / machines))


def free_memory():
    """Bytes of main memory that are free, limits of a container or a SLURM job included; 0 if it cannot be told."""
    free, groups = [], {Path()}                                        # a container sees its own as the top, a job not
    with contextlib.suppress(OSError, TypeError, ValueError):           # TypeError: no such line
        free.append(int(re.search(r'MemAvailable:\s+(\d+)', Path('/proc/meminfo').read_text())[1]) * 1024)
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/cgroup').read_text().splitlines():        # 5:memory:/slurm/job_7
            inner = Path(line.split(':', 2)[-1].strip('/'))
            groups |= {inner, *inner.parents}
    for kind, limit, used in [('', 'memory.max', 'memory.current'),    # cgroup v2, and v1
                              ('memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes')]:
        for folder in (Path('/sys/fs/cgroup', kind, group) for group in groups):
            with contextlib.suppress(OSError, LookupError, ValueError):        # 'max' is no number
                cached = re.findall(r'inactive_file (\d+)', (folder / 'memory.stat').read_text())[-1]     # can be freed
                free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cached))
    if not free:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            free.append(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 2)     # macOS: half, at a guess
        with contextlib.suppress(AttributeError):                      # Windows
            status = (ctypes.c_ulonglong * 8)(64)                      # MEMORYSTATUSEX, which begins with its size
            ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
            free.append(status[2])
    return min(free, default=0)


def keep_freed_memory():
    """Let glibc keep what tensors free instead of giving it back to the system after each of them.

    On a CPU every step frees and asks again for hundreds of megabytes: 25,000 page faults per step of a
    resnet18 U-Net at 128x128 with batch 8, none with these two settings (mallopt(3)). Other C libraries stay.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):      # TypeError: Windows
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2**20)                                   # M_MMAP_THRESHOLD, at its largest
        libc.mallopt(-1, 2**31 - 1)                                    # M_TRIM_THRESHOLD


# The decision: autocast dtype ('float32': no autocast; 'float16': with a scaler), TF32 setting, reason, warnings.
Precision = namedtuple('Precision', 'dtype tf32 reason warnings', defaults=[()])
VERY_LARGE = 200e6                 # parameters: float16 activations of such networks are likely to overflow
IDLE_ON_OWN = DATA_KEYS - {'data', 'class_names', 'seed'} | set(      # keys without effect on data of your own
    'num_classes in_channels image_size size_policy augment mirror mean std image_dtype cache_images max_image_pixels '
    'skip_broken architecture encoder encoder_weights decoder_channels loss initial_weights class_weights '
    'progressive_resizing oversample_foreground activation_checkpointing'.split())
SCALING = {'init_scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000}
AS_DELIVERED = SCALING | {'tf32_matmul_precision': 'high', 'decoder_channels': 'auto', 'momentum': 0.9,
                          'keep_float32': None, 'val_fraction': 0.2}    # any other value: CONFIG was edited


def resolve_precision(config, hardware, typed=None):
    """(config, hardware) -> Precision. Pure: asks nothing of the machine. `typed`: the keys that the user set; of these
    it is told where they have no effect. None: the settings are a trained run's, nothing is told of them."""
    use_amp, wish, units = config['use_amp'], config['amp_dtype'], hardware.units
    where, asked = hardware.name, 'use_amp=True' if wish == 'auto' else f'amp_dtype={wish!r}'
    usual = ['bfloat16', 'float16'] if hardware.kind == 'cuda' or use_amp is True else ['bfloat16']
    wanted = wish if wish != 'auto' else next((dtype for dtype in usual if dtype in units), None)
    note = None
    if use_amp is False:
        dtype, reason = 'float32', 'use_amp=False'
        note = f'{asked} has no effect with use_amp=False' if wish != 'auto' else None
    elif wanted in units:
        dtype, reason = wanted, f'{where} has native {wanted} units'
        reason = reason if wish == 'auto' else f'{asked} and {reason}'
        if wish == 'float16' and 'bfloat16' in units:
            note = f'amp_dtype=float16: {where} has native bfloat16, which is as fast and cannot overflow'
    elif hardware.kind == 'cpu' and (use_amp is True or wish != 'auto'):
        dtype, reason = 'bfloat16' if wish == 'auto' else wish, asked
        note = f'{asked}: {where} has no {dtype} units; autocast may be ten times slower here than use_amp=False'
    else:
        dtype = 'float16' if wish != 'auto' and 'float16' in units else 'float32'
        reason = f'{where} has no ' + ('units that make mixed precision faster' if wish == 'auto' else f'{wish} units')
        if use_amp is True or wish != 'auto':
            note = f'{asked}: {reason}; falling back to {dtype}{" with a gradient scaler" * (dtype == "float16")}'
    notes = [note] if note else []
    notes += [] if typed is None else notes_on_settings(config, hardware, dtype, typed)
    return Precision(dtype, config['tf32_matmul_precision'], reason, tuple(notes))


def works_on_cpu(tf32, hardware):
    """Whether a tf32_matmul_precision changes anything on a CPU: 'medium' does where there are bfloat16 units."""
    return hardware.kind == 'cpu' and tf32 == 'medium' and 'bfloat16' in hardware.units


def suits_channels_last(precision, hardware):
    """Whether convolutions are faster in channels_last: always on a CPU, on a GPU only with Tensor Cores. In float32 a
    V100 took 1.6 times as long as in NCHW (pytorch issue 44943, torch 1.6); Apple GPUs got it wrong (see laid_out)."""
    uses_tf32 = 'tf32' in hardware.units and precision.tf32 != 'highest'       # None too: cuDNN's default allows it
    return hardware.kind == 'cpu' or hardware.kind == 'cuda' and (precision.dtype != 'float32' or uses_tf32)


def notes_on_settings(config, hardware, dtype, typed):
    """Notes on settings, typed or edited in CONFIG, that have no effect, or an unexpected one, in this run."""
    notes, tf32 = [], config['tf32_matmul_precision']
    wishes = {*typed, *(key for key, delivered in AS_DELIVERED.items() if config[key] != delivered)}
    for keys, has_effect, why in (
            (['decoder_channels'], config['architecture'] in HAVE_WIDTHS, f'only {", ".join(HAVE_WIDTHS)} have them'),
            (['momentum'], config['optimizer'].lower() == 'sgd', 'only SGD is given it'),
            (IDLE_ON_OWN, config['data'] != OWN_DATA, 'data sets, network and loss of your own decide that themselves'),
            (['weight_decay', 'warmup_fraction', 'grad_clip'], config['optimizer'].lower() != 'rprop',
             'Rprop finds the length of its steps itself, without decay'),
            (['keep_float32'], dtype != 'float32', 'all of this run is in float32'),
            (SCALING, dtype == 'float16', f'only float16 is scaled and this run uses {dtype}')):
        if (idle := [key for key in CONFIG if key in keys and key in wishes]) and not has_effect:
            notes.append(f'{", ".join(idle)}: no effect, {why}')
    if 'tf32_matmul_precision' in wishes and tf32 in ('high', 'medium'):
        asked = f'tf32_matmul_precision={tf32!r}'
        if works_on_cpu(tf32, hardware):
            notes.append(f'{asked} is not inert on this CPU: it allows float32 matrix products in bfloat16')
        elif 'tf32' not in hardware.units:
            notes.append(f'{asked}: no effect, {hardware.name} has no TF32')
        elif dtype != 'float32' and not config['keep_float32']:
            notes.append(f'{asked}: next to no effect under {dtype} autocast')
    return notes


def apply_tf32(setting):
    """Set TF32 for matrix products and for convolutions (cuDNN allows it by default). None: leave PyTorch's setting.

    From torch 2.9 on there are new settings (fp32_precision) beside the old ones. Both are set alike, the old ones
    first: where they differ, reading the old ones raises an error, and torch.compile reads them.
    """
    if setting is None:
        return
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    with warnings.catch_warnings():                                    # some versions call the old ones deprecated
        warnings.simplefilter('ignore')
        torch.set_float32_matmul_precision(setting)
        cudnn.allow_tf32 = setting != 'highest'
    if hasattr(cudnn, 'conv') and hasattr(cuda.matmul, 'fp32_precision'):
        if setting == 'highest':                                       # for all operations, whatever was set before
            torch.backends.fp32_precision = 'ieee'
        for part in (cudnn, cuda.matmul, cudnn.conv, cudnn.rnn):
            part.fp32_precision = 'ieee' if setting == 'highest' else 'tf32'
        torch.backends.mkldnn.matmul.fp32_precision = {'highest': 'ieee', 'high': 'tf32', 'medium': 'bf16'}[setting]


def seed_everything(seed):
    """Seed Python, NumPy and torch. Data needs none: augmentation is a function of (seed, epoch, index)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_of(*numbers):
    """One seed that follows from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# ===== data: pairing ==================================================================

SPLITS = ('train', 'val', 'test')
IGNORE = 255                       # the id of ignored pixels once a mask is decoded
SPLIT_WORDS = {word: split for split, words in {
    'train': 'train training trn tr trainval entrenamiento treino entrainement entraînement addestramento обучение '
             '训练 训练集',
    'val': 'val valid validate validation vd dev eval evaluation validacion validación validacao validação validierung '
           'validazione валидация 验证 验证集',
    'test': 'test testing tst ts te holdout hold-out hold_out prueba teste тест 测试 测试集'}.items()
    for word in words.split()}
LONG_SPLIT_WORDS = '|'.join(sorted((word for word in SPLIT_WORDS if len(word) > 2), key=len, reverse=True))
SET_WORDS = {'aug', 'crop', 'crops', 'data', 'set', 'split'}
IMAGE_WORDS = set('image images img imgs jpegimages photo photos picture pictures raw leftimg frames input '
                  'inputs rgb scans rawimages'.split())
MASK_WORDS = set('mask masks label labels lab labs labeled labelled lbl lbls annotation annotations annot annots anno '
                 'ann anns gt gts segmentationclass segmentation segmentations groundtruth gtfine target '
                 'targets truth truths groundtruths seg segm segmap segmaps gtmaps pixels labelids matte mattes '
                 'matting trimaps manual semantic'.split())
DERIVED_WORDS = set('overlay overlays vis viz visual visualized visualization blend preview compare comparison fov roi '
                    'panoptic inst instance instances instanceids color colors colour colours colormap edge edges gray '
                    'inv invgray ref depth dsm flows prediction predictions predicted predict pred preds results '
                    'visualisation visualisations visualizations merged superimposed blended binarisation '
                    'binarization distance distances dist distancemap distancemaps heatmap heatmaps weightmap '
                    'weightmaps confidence'.split())
SOUND_WORDS = {'good', 'ok', 'normal', 'healthy', 'negative', 'clean'}         # of images without what is looked for
PLACE_WORDS = {*SPLIT_WORDS, *SET_WORDS, *IMAGE_WORDS, *MASK_WORDS}
JPEG_SUFFIXES = ('.jpg', '.jpeg', '.jfif', '.jpe')
SUFFIXES = {*JPEG_SUFFIXES, *'.png .bmp .gif .webp .jp2 .j2k .ppm .pgm .pbm .tif .tiff .npy .mat'.split()}
NOT_READ = {*'.heic .heif .avif .jxl .dng .cr2 .cr3 .nef .arw .psd .xcf .svg .pdf .dcm .nii .gz .mha .mhd .nrrd .czi '
            '.nd2 .lif .svs .h5 .hdf5 .npz .parquet .exr .mp4 .mov .avi'.split()}       # may hold pictures all the same
ARCHIVES = {'.zip', '.rar', '.7z', '.tar', '.tgz'}
CLASS_LIST = re.compile(r'.*(class|categor|label|colou?r|codes).*\.(txt|csv|tsv)', re.IGNORECASE)


def may_be_read(name):
    """Whether a file of this name may be an image or a mask: a suffix that can be read, and not hidden."""
    suffix = name[name.rfind('.'):].lower()
    return (suffix in SUFFIXES or suffix in READERS) and not name.startswith('.')


@dataclasses.dataclass
class Pairs:
    """Images and masks that belong together. Paths are NumPy bytes: forked workers would copy Python strings in use."""
    images: np.ndarray             # (N,) bytes
    masks: np.ndarray              # (N,) bytes; a folder is the union of its files, paths joined by UNITED likewise
    splits: np.ndarray             # (N,) index into SPLITS
    drawn: np.ndarray              # (N,) whether the split was drawn by chance, not told by a name
    rule: str                      # how they were paired, in words
    notes: list                    # what was ignored
    class_lists: tuple = ()        # text files that may list the classes

    def rows(self, split):
        """Indices of one split, in the order of the names; without validation images the training images."""
        rows = np.flatnonzero(self.splits == SPLITS.index(split))
        return self.rows('train') if split == 'val' and not len(rows) else rows


def folder_words(name):
    """'train_masks' -> ['train', 'masks']; 'trainannot' -> ['train', 'annot']."""
    words = []
    name = unicodedata.normalize('NFC', name)                          # a Mac takes é apart
    plain = re.sub('[-_ ]with[-_ ].*', '', name)                       # frames-with-annotations are frames
    # imagesTr are for training; BraTS and MatLab are each one word
    apart = re.sub(r'(?<=[a-z])(?=[A-Z])(?!TS(?![a-z])|(?<=[Mm]at)Lab(?![a-z]))', ' ', plain)
    for word in re.findall('[a-z]+', apart.lower()) + [name.lower()]:
        match = re.fullmatch(f'({LONG_SPLIT_WORDS})(.+)', word)
        words += match.groups() if match and match[2] in {*IMAGE_WORDS, *MASK_WORDS, *SET_WORDS} else [word]
    return words


def told_role(name):
    """'mask', 'image' or '', by the words in the name of a folder. Mask words win: gt_images/ holds masks."""
    words = set(folder_words(name))
    return 'mask' if MASK_WORDS & words else 'image' if IMAGE_WORDS & words else ''


SINGULAR = sorted({word.removesuffix('s') for word in IMAGE_WORDS | MASK_WORDS}, key=len, reverse=True)
ROLE_WORD = re.compile(rf'(?<![a-z])({"|".join(SINGULAR)})s?(?![a-z])')


@functools.lru_cache(1000)
def bare(path):
    """A path without the words for images and masks in its names: 'a/Img0_mask.png' -> 'a/0.png'."""
    return '/'.join(re.sub(r'([-_ ])[-_ ]+|[-_ ]+(?=[.]|$)', r'\1', ROLE_WORD.sub('', part)).strip('-_ ') or part
                    for part in path.lower().split('/'))


@functools.cache
def read_place(folder, role='', which=-1):
    """What the path of a folder, relative to data, says of its files -> (split, role, kind, rest), '' where it says
    nothing. split: one of SPLITS; role: 'image' or 'mask' (passed in where the user named the folder); kind: the part
    of the path that told the role; rest: the parts that told nothing, such as a folder per city, patient or image.
    `which` part tells the role where several could: -1 the last, 0 the first."""
    split, kind, rest, parts = '', '', [], Path(folder).parts
    told = [at for at, part in enumerate(parts) if told_role(part) and (which or not role)]    # 0: not if role is given
    chosen = told[which] if told else None                             # which=-1: masks1 in Train Images/masks1
    said = told_role(parts[chosen]) if told else ''
    role = role or said
    for at, part in enumerate(parts):
        words = folder_words(part)                                     # DIS-TE1 is for test, not TCGA-TS-A7P1
        is_alone = at == chosen or len(words) == 2 or re.search(r'[-_ ](TR|VD|TE|TS)\d*$', part)
        named = {SPLIT_WORDS[w] for w in words if w in SPLIT_WORDS and (len(w) > 2 or is_alone)}
        named = {'test'} if named == {'test', 'val'} else named        # test-dev/ is for testing
        found = named.pop() if len(named) == 1 else ''                 # TrainVal_annotations/ names two
        is_inner = found and split == 'train' and {*words[:-1]} <= PLACE_WORDS         # not train/test tube/
        split = found if is_inner or not split else split
        if at == chosen and said in (role, 'image'):                   # image: masks/1/images, where masks= was typed
            kind = part if said == role else ''
        elif not found or re.search(r'\d', part):                      # train_001/ names the split and one image
            rest.append(part)
    return split, role, kind, '/'.join(rest)


def stem_in(pattern, between=''):
    """A function: name -> what {stem} stands for in the pattern, joined by `between` if it has two; None: no match.
    A * in it stands for anything."""
    literal = lambda part: re.escape(part).replace(r'\*', '.*')
    regex = re.compile('(.*)'.join(map(literal, pattern.split('{stem}'))), re.IGNORECASE | re.DOTALL)
    return lambda name: between.join(match.groups()) if (match := regex.fullmatch(name)) else None


def relative(path, start):
    """The path from a folder on; as it is from another drive of Windows, from which no path leads there."""
    with contextlib.suppress(ValueError):
        return os.path.relpath(path, start)
    return os.fspath(path)


OF_THE_SYSTEM = {'@eadir', '#recycle', '@recycle', '$recycle.bin', '#snapshot', '__macosx', 'lost+found',
                 'system volume information'}                          # thumbnails and what was deleted


def list_files(root):
    """Every file below root as (folder, name), sorted. Links are followed once; no hidden folders, no runs."""
    def refuse(error):
        raise DataError(f'{error.filename}: cannot be read: {error.strerror}')

    ours = {os.path.realpath('runs')} - {os.path.realpath(root)}       # holds no data, unless data= names it
    found, seen = [], {}                                               # {real path: the path it was met by}
    for path, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(path)
        first = seen.setdefault(real, path)
        if first != path and real not in ours:
            log.warning('ignored %s: it is the same folder as %s', path, first)
        if first != path or real in ours or {'config.py', 'log.txt'} <= {*names} and path != os.fspath(root):
            folders.clear()
            continue
        folders[:] = sorted(folder for folder in folders
                            if not folder.startswith('.') and folder.lower() not in OF_THE_SYSTEM)
        place = os.path.relpath(path, root).replace(os.sep, '/').removeprefix('.')
        found += [(place, name) for name in names]
    return sorted(found)


@dataclasses.dataclass
class Found:
    """One file that may be an image or a mask, with what read_place told of its folder."""
    path: str
    stem: str                      # the name without its suffix, or what {stem} stands for in its pattern
    split: str = ''
    kind: str = ''
    rest: str = ''


def matcher(base):
    """A function: folder -> a match if it is base or below it. Its groups: what each * means, and the path below."""
    start = '()' if base == '.' else re.escape(base).replace(r'\*', '([^/]*)')
    return re.compile(f'{start}(?:^|/|$)(.*)', re.DOTALL).fullmatch


def top_pictures(files):
    """The names of the files in the top folder itself that may be images or masks; a single one is of the README."""
    names = [name for folder, name in files if not folder and may_be_read(name)]
    return names if len(names) > 1 else []


def files_of(base, root, files):
    """The files in a folder that the user named -> [(path, what each * stands for and the folders below, name)].
    base may hold *; it is relative to root, or without * to any folder in it, or leads out. `files`: all below root."""
    if os.path.isabs(base) and not (inside := relative(base, root)).startswith('..'):
        base = inside
    if base and os.path.normpath(base) == '.' and (on_top := top_pictures(files)):     # not those in its folders
        return [(name, '', name) for name in on_top]
    base = os.path.normpath(base).replace(os.sep, '/')
    leads_out = os.path.isabs(base) or base.startswith('..')
    is_plain = '*' in base or os.path.isdir(root / base)
    match = matcher(base) if is_plain else re.compile(f'(.*)/{re.escape(base)}(?:/|$)(.*)', re.DOTALL).fullmatch
    found = [] if leads_out else [(os.path.join(folder, name), '/'.join(filter(None, inside.groups())), name)
                                  for folder, name in files if (inside := match(folder))]
    return found or [(os.path.join(base, folder, name), folder, name)  # a run's, or hidden: named, it is meant
                     for folder, name in list_files(existing_folder(root / base))]


def by_role(candidates, config, root, ignored):
    """Candidates (path, folder, name, what read_place tells) -> {'image': [Found, ...], 'mask': ..., '': of no role};
    the others go into `ignored`. Folders tell the role, else the patterns. With mask_pattern folders tell nothing where
    none is named after masks (and, without image_pattern, those named after images alone hold what it fits), nor in a
    folder for one image (img_0_json/ holds img.png and label.png). What is typed keeps its role."""
    patterns = {role: config[f'{role}_pattern'] for role in ('image', 'mask') if config[f'{role}_pattern']}
    stem_keys = {role: stem_in(pattern) for role, pattern in patterns.items()}

    def stems_of(name):
        """{role: stem} of the patterns that fit, or only of the longest: x_RGB.png does not count as {stem}.png"""
        found = {role: stem for role, stem_of in stem_keys.items() if (stem := stem_of(name)) is not None}
        longest = max((len(patterns[role]) for role in found), default=0)
        return {role: stem for role, stem in found.items() if len(patterns[role]) == longest}

    held = defaultdict(set)                                            # folder: the roles that names in it tell
    for _, folder, name, _ in candidates:
        if len(stems_of(name)) == 1:
            held[folder] |= stems_of(name).keys()
    patterns_tell = 'mask' in patterns and all(
        role == 'image' or not role and (len(patterns) == 2 or 'mask' not in stems_of(name))
        for _, _, name, (_, role, _, _) in candidates)
    found, unlike = {'image': [], 'mask': [], '': []}, {}              # unlike: {path: the pattern it does not fit}
    for path, folder, name, (split, role, kind, rest) in candidates:
        stem, suffix = os.path.splitext(name)
        if not may_be_read(name):
            if not split_listed(name):                                 # of train.txt split_by_names tells
                suffix = '.tar' if '.tar.' in name.lower() else suffix
                is_packed = suffix.lower() in ARCHIVES or suffix.lower() == '.gz' and may_be_read(stem)      # x.ppm.gz
                why = ', to be unpacked first if meant' * is_packed \
                    or ', to be saved as PNG or TIFF first if meant' * (suffix.lower() in NOT_READ)
                ignored[f'*{suffix.lower()}{why}' if suffix else 'without an ending such as .png'].append(name)
            continue
        is_for_one = len(held[folder]) == 2 and re.search(r'\d', posixpath.basename(folder))
        if role and not config['images'] and (patterns_tell or is_for_one):            # typed: it stands
            role, kind, rest = '', '', folder
        stems = stems_of(name)
        if not role and 'mask' in stems:
            role = 'mask'
        elif not role and ('image' in stems or patterns.keys() == {'mask'}):
            role = 'image'
        if role in patterns and role not in stems or not role and len(patterns) == 2:
            unlike[path] = patterns.get(role) or ' or '.join(patterns.values())
            continue
        told = (unicodedata.normalize('NFC', text) for text in (stems.get(role, stem), split, kind, rest))
        found[role].append(Found(os.path.join(root, path), *told))     # a Mac splits letters from their accents
    in_use = {file.path for file in itertools.chain(*found.values())}  # images= and masks= may be one folder
    for path, pattern in unlike.items():
        if os.path.join(root, path) not in in_use:
            ignored[f'not like {pattern}'].append(os.path.basename(path))
    return found


def collect(config, root, files, which):
    """All candidate files of a folder -> (images, masks, notes). DataError if only images= or only masks= is given."""
    sources = {'image': config['images'], 'mask': config['masks']}
    if not any(sources.values()):
        sources = {'': ''}
    elif not all(sources.values()):
        raise DataError(f"images={config['images']!r} and masks={config['masks']!r}: give both folders")
    told = len(shared_folder(files)) if '' in sources else 0           # what all paths share tells nothing
    candidates = [(path, folder, name, read_place(folder[told:].lstrip('/'), role, which))
                  for role, base in sources.items() for path, folder, name in files_of(base, root, files)]
    ignored, seen = defaultdict(list), {path for path, *_ in candidates}       # ignored: {why: names of files}
    ignored['outside of images= and masks='] = [name for folder, name in files
                                                if may_be_read(name) and os.path.join(folder, name) not in seen]
    images, masks, loose = by_role(candidates, config, root, ignored).values()
    for file in loose if images else ():
        folder = os.path.dirname(relative(file.path, root)) or 'the top folder'
        folder = re.sub(r'\d+', '*', folder)                           # one note for a thousand numbered folders
        ignored[f'in {folder}, whose name is neither of images nor of masks'].append(os.path.basename(file.path))
    if '' in sources and not images and not loose and all(both := tell_apart(masks)):      # in annotations/ alone
        images, masks = both
    elif '' in sources and not config['mask_pattern'] and (
            not masks                                                  # together in one folder, perhaps named Imgs
            or is_whole(masks) and is_whole(images or loose)):         # two copies, one in mri-segmentation/
        images, masks = tell_apart([*(images or loose), *masks])
    elif not images:                                                   # the names of their folders tell no role
        images = loose
    masks = without_results(images, masks, ignored)
    images = best_of_twins(images, '.mat', 0, ignored)                 # x.mat goes with the photograph x.jpg
    masks = best_of_twins(masks, JPEG_SUFFIXES, 0.5, ignored)          # x.jpg is a picture of the mask x.png
    return images, masks, tell_ignored(ignored)


RESULT_WORD = re.compile(r'(?<![a-z])(pred|predict(ed|ions?)?|outputs?)(?![a-z])', re.IGNORECASE)


def without_results(images, masks, ignored):
    """The masks without those whose names say that a program made them, where another mask of the same name lies beside
    them (x_pred.png beside x.png or x_mask.png); these go into `ignored`."""
    named = [file for file in masks if RESULT_WORD.search(file.stem)]
    if not named or any(RESULT_WORD.search(image.stem) for image in images):
        return masks
    base = lambda file: (os.path.dirname(file.path), bare(RESULT_WORD.sub('', file.stem)))
    others = {base(file) for file in masks if not RESULT_WORD.search(file.stem)}
    results = {file.path for file in named if base(file) in others}
    ignored['named as results'] = sorted(map(os.path.basename, results))
    return [file for file in masks if file.path not in results]


def best_of_twins(files, suffixes, least, ignored):
    """The files without those of these suffixes that lie beside another of the same stem; they go into `ignored`. Only
    if at least the share `least` of the others have such a twin: fewer are a mistake, which is reported later."""
    is_lesser = lambda file: file.path.lower().endswith(suffixes)
    others = {os.path.splitext(file.path)[0] for file in itertools.filterfalse(is_lesser, files)}
    twins = {file.path for file in filter(is_lesser, files) if os.path.splitext(file.path)[0] in others}
    if len(twins) < least * len(others):
        return files
    ignored['beside another of the same name'] += map(os.path.basename, sorted(twins))
    return [file for file in files if file.path not in twins]


def tell_ignored(ignored):
    """{reason: [names of files]} -> a line for each."""
    why = lambda what: re.sub('^, ([*]|without an)[^,]*', '', f', {what}')             # of Thumbs.db not: *.db
    return [f'ignored {names[0]}{why(what)}' if len(names) == 1 else
            f'ignored {len(names)} files, {what}: {names[0]}, ...' for what, names in sorted(ignored.items()) if names]


def shared_folder(files):
    """The folder that all folders of images and masks lie in; '' for data itself. Its name tells none from another."""
    folders = [folder for folder, name in files if may_be_read(name)]
    shared = posixpath.commonpath(folders) if folders else ''
    return posixpath.dirname(shared) if shared in folders else shared


def named_masks(files):
    """Of each file whether a word in its name says that it is a mask."""
    word = re.compile(rf'(^|[^a-z])({"|".join(MASK_WORDS)})\d*($|[^a-z])', re.IGNORECASE)
    return [bool(word.search(file.stem)) for file in files]


def is_whole(files):
    """Whether these files alone are a set: half of them, by their names, are the masks of the others."""
    return 2 * sum(named_masks(files)) == len(files) == 2 * len(match_split(*tell_apart(files))[0]) > 0


def tell_apart(files):
    """Files whose folders tell no role -> (images, masks): by a word in the name, or as x.png beside x.jpg."""
    are_masks = named_masks(files)
    if not any(are_masks):
        times = Counter((file.split, file.rest, file.stem) for file in files)
        are_masks = [times[file.split, file.rest, file.stem] > 1 and not file.path.lower().endswith(JPEG_SUFFIXES)
                     for file in files]
    images, masks = [], []
    for file, is_mask in zip(files, are_masks):                        # the folder holds both roles: its name is rest
        is_above = f'/{file.kind}/{file.rest}/' in f'/{file.path}'     # keeps the order that they have in the path
        parts = (file.kind, file.rest) if is_above else (file.rest, file.kind)
        (masks if is_mask else images).append(dataclasses.replace(file, kind='', rest='/'.join(filter(None, parts))))
    return images, masks


def existing_folder(path):
    """The path, if it is a folder; else a DataError that names what is there instead."""
    try:
        if path.is_dir():
            return path
    except OSError as error:                                           # no permission, or a name of 300 letters
        raise DataError(f'{path}: cannot be read: {error.strerror}') from None
    if path.exists():
        raise DataError(f'{path}: is a file; expected a folder of images and masks, or a list whose name ends in .csv, '
                        'with the columns image,mask')
    if path.is_symlink():
        raise DataError(f'{path}: is a link to {os.readlink(path)}, which is not there')
    advice = named_like(path)
    if re.search('[\a\b\t\n\v\f\r].', str(path)):
        advice = '; a backslash was read as the beginning of a tab or the like: write D:/train'
    elif '*' in path.name and may_be_read(path.name):
        pattern = as_typed('image_pattern', path.name.replace('*', '{stem}', 1))
        advice = f'; type the folder alone, and {pattern} or mask_pattern for its files'
    raise DataError(f'{path}: there is no such folder{advice}')


def named_like(path):
    """": did you mean 'x'?" where something of a similar name lies beside a path that is not there, else ''."""
    above = os.path.dirname(path) or '.'
    return did_you_mean(os.path.basename(path), os.listdir(above)[:2000] if os.path.isdir(above) else [])


def name_words(name):
    """The words of a name, those of axes alike: x3_y5 and col3_row5 have the same."""
    axes = {'col': 'x', 'column': 'x', 'row': 'y'}
    return [axes.get(word, word) for word in re.findall(r'[^\W\d_]+', name.replace('{stem}', ' '))]


def name_patterns(image, masks):
    """The stem of one image and those of all masks -> [(image pattern, mask pattern), ...] that may pair them, with
    {stem} for what both share, as in {stem}_sat and {stem}_mask; those with the fewest letters besides come first."""
    tokens, found = re.compile(r'[^\W\d_]+|\d+|\W|_').findall, set()
    digits = max(re.findall(r'\d+', image), key=len, default='')
    of_image = tokens(image)
    for mask in [stem for stem in masks if digits in stem][:200] or masks[:200]:
        of_mask, first, second = tokens(mask), [], []
        for _, a, b, c, d in difflib.SequenceMatcher(None, of_image, of_mask, False).get_opcodes():
            mine, other = ''.join(of_image[a:b]), ''.join(of_mask[c:d])
            is_shared = mine == other and re.search(r'[^\W_]', mine)   # not a lone _ or -
            first.append('{stem}' if is_shared else mine)
            second.append('{stem}' if is_shared else other)
        words, others = ({*name_words(' '.join(parts))} for parts in (first, second))
        if 0 < first.count('{stem}') < 7 and not words & others:       # x1_y2 is not y1_x2; more take too long
            found.add((''.join(first), ''.join(second)))
    return sorted(found, key=lambda patterns: (len(' '.join(patterns).replace('{stem}', '')), patterns))


def are_of_others(first, second, images):
    """Whether numbers in patterns of images and masks tell of wrong pairs: those before {stem} differ (p3_{stem} and
    p4_{stem}), or those after it do ({stem}_6 and {stem}_0) and there are images _0, or there is but one image."""
    numbers, others = (re.findall(r'\d+|{stem}', pattern) for pattern in (first, second))
    if numbers == others or not ({*numbers} - {'{stem}'} and {*others} - {'{stem}'}):
        return False
    until = len(numbers) - numbers[::-1].index('{stem}')
    if len(numbers) != len(others) or numbers[:until] != others[:until] or len(images) < 2:
        return True
    theirs = iter(others)
    own = stem_in(re.sub(r'\d+|{stem}', lambda _: next(theirs), first))
    return any(own(image.stem.casefold()) is not None for image in images)


def stem_rules(images, masks):
    """Ways to turn casefolded stems into equal keys, most literal first: (description, image -> key, mask -> key)."""
    yield 'equal stems', str, str
    usual, stems = images[len(images) // 2].stem.casefold(), [mask.stem.casefold() for mask in masks]
    some = [usual, *(images[len(images) * at // 7].stem.casefold() for at in (2, 5))]          # one may have no mask
    digits = max(re.findall(r'\d+', stems[len(stems) // 2]), key=len, default='')      # few images may have a mask
    some += [stem for image in images if digits in (stem := image.stem.casefold())][:1]
    for patterns in dict.fromkeys(patterns for stem in some for patterns in name_patterns(stem, stems)[:8]):
        between = '' if '{stem}{stem}' in ' '.join(patterns) else '\0'               # S1Img12 is not S11Img2
        if are_of_others(*patterns, images):
            continue
        yield 'names like {} and {}'.format(*patterns), *(stem_in(pattern, between) for pattern in patterns)
    numbers = lambda stem: (*map(int, re.findall(r'\d+', stem)),) or (-1,)
    number = lambda stem: numbers(stem)[-1]
    of_images, of_masks = ([numbers(file.stem) for file in files] for files in (images, masks))
    mine, other = map(name_words, (usual, stems[len(stems) // 2]))
    if [word for word in mine if word in other] != [word for word in other if word in mine]:
        return                                                         # x0_y1 is not y0_x1
    if len({*map(len, of_images + of_masks)}) == 1 < len(of_images[0]):
        yield 'the numbers in the stem', numbers, numbers              # p3_1 is not p4_1
        if {*mine} & {*other}:                                         # but rgb8_1 is mask1_1
            return
    first, last = zip(*((found[0], found[-1]) for found in of_images))
    if first != last and sorted(first) == sorted(found[-1] for found in of_masks):
        return                                                         # frame_0_t3: is its mask 0 or 3?
    begins = {found[:len(of_images[0])] for found in of_masks}
    own = {found: image.stem.casefold() for found, image in zip(of_images, images)}
    ends_so = mine and all(stem.endswith(own.get(found[-1:], '\0')) for stem, found in zip(stems, of_masks))
    if 1 < len(begins) and begins <= {*of_images} and max(map(len, of_masks)) > len(of_images[0]) and not ends_so:
        return                                                         # img10_2: is it of img10 or of img2?
    yield 'the last number in the stem' if re.search(r'\d', usual) else 'their folders', number, number


def grouped(items, key):
    """{key(item): [its items], ...}"""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def shared_start(texts):
    """What all of these begin with. (os.path.commonprefix is deprecated from Python 3.15 on.)"""
    return ''.join(letters[0] for letters in itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts)))


def match_pairs(images, masks):
    """match_split over all files, or over each split by itself where folders of images and of masks tell splits, since
    each may want its own rule: in DRIVE 21_training goes with 21_manual1 and 01_test with 01_manual1."""
    are_told = all(any(file.split for file in files) for files in (images, masks))         # on both sides
    of_image, of_mask = (grouped(files, lambda file: are_told and file.split) for files in (images, masks))
    parts = [match_split(of_image[split], of_mask[split]) for split in sorted(of_image.keys() | of_mask.keys())]
    pairs, rules, *others = zip(*parts)
    return sum(pairs, []), ' and '.join(filter(None, dict.fromkeys(rules))), *(sum(files, []) for files in others)


def are_strangers(image, mask):
    """Whether two files have but a number in common, and their folders differ in numbers alone: p3/0.jpg, p4/0.png."""
    folder, other = bare(image.rest), bare(mask.rest)
    is_alike = re.sub(r'\d+', '0', folder) == re.sub(r'\d+', '0', other)
    return image.stem.isdigit() and folder != other and is_alike and bool(re.search(r'[^\W\d_]', folder))


def match_split(images, masks):
    """The first rule that pairs every image with one mask wins, else the one that comes nearest
    -> (pairs, rule, unpaired images, unpaired masks, groups of files that share one stem)."""
    if not images or not masks:
        return [], '', images, masks, []

    def keyed(files, stem_key, place_of):
        """{(folder, what the rule makes of the stem): files}"""
        return grouped(files, lambda file: ((place := place_of(file))[0], stem_key(place[1].casefold())))

    places = (lambda file: (file.rest, file.stem),
              lambda file: (re.sub(r'\D', '', file.kind) + '/' + bare(file.rest), file.stem),   # images_1/ and masks_1/
              lambda file: ('', file.stem))
    if any(file.rest for file in [*images, *masks]):
        places += (lambda file: ('', re.sub('[-_ ./]+', '_', f'{file.rest}/{file.stem}').strip('_')),)      # a/1, a_1
    best, most = None, -math.inf
    rules = ((*rule, place_of) for rule in stem_rules(images, masks) for place_of in places)
    for rule, image_key, mask_key, place_of in rules:                  # lazily: later ones are costly to make
        of_image, of_mask = keyed(images, image_key, place_of), keyed(masks, mask_key, place_of)
        common = sorted(key for key in of_image.keys() & of_mask.keys() if key[-1] is not None)
        clashes = [table[key] for table in (of_image, of_mask) for key in common if len(table[key]) > 1]
        pairs = [(of_image[key][0], of_mask[key][0]) for key in common]
        pairs = [pair for pair in pairs if not are_strangers(*pair)]
        if (score := len(pairs) - len(clashes)) > most:
            best, most = (pairs, rule, clashes), score
        if most == min(len(images), len(masks)):                       # no later rule can pair more
            break
    pairs, rule, clashes = best
    used = {file.path for group in [*pairs, *clashes] for file in group}
    images, masks = ([file for file in files if file.path not in used] for files in (images, masks))
    of_image, of_mask = (keyed(files, str, places[0]) for files in (images, masks))
    same = {key: None for key in of_image if len(of_image[key]) == len(of_mask.get(key, ())) == 1}
    if same:                                                           # 1.png with 1.png, but 2.png with 2_mask.png
        pairs, rule = pairs + [(*of_image[key], *of_mask[key]) for key in same], f'{rule} and equal stems'
        images, masks = ([file for key, files in table.items() if key not in same for file in files]
                         for table in (of_image, of_mask))
    pairs = [(dataclasses.replace(image, split=image.split or mask.split), mask) for image, mask in pairs]
    return pairs, rule, images, masks, clashes


def unite_folders(images, masks):
    """Pairs where each image has its own folder of masks, one file per object (DSB-2018), beside it or named after its
    stem -> as match_pairs, the folders being the masks if some hold several files; None where files do not lie so."""
    split = (lambda file: file.split) if any(mask.split for mask in masks) else lambda file: ''
    groups = grouped(masks, lambda mask: (split(mask), bare(mask.rest)))           # a/7_mask/ is of a/7.jpg too
    places = {(split(image), bare(image.rest or image.stem)): image for image in images}
    together = {os.path.dirname(image.path) for image in images} & {os.path.dirname(mask.path) for mask in masks}
    is_one_each = len(places) == len(images) and groups.keys() <= places.keys()
    is_one_each &= len({os.path.dirname(mask.path) for mask in masks}) == len(groups)      # no mask-0/ beside mask-1/
    if together or not is_one_each or len(groups) < len(images) / 2:
        return None
    mixed = {(mask.split, mask.rest, bool(DERIVED_WORDS & {*folder_words(mask.stem)})) for mask in masks}
    stems = {(mask.split, mask.rest, mask.stem, mask.kind and mask.path) for mask in masks}    # all, if named so
    if len(mixed) > 1.5 * len(groups) or len(stems) < 0.75 * len(masks):       # most hold a mask.png and its
        return None                                                    # mask_color.png, or each 1.bmp and its 1.png
    rule, united = 'one folder per image', {place: group[0] for place, group in groups.items()}
    if len(groups) < len(masks):
        rule += f', its masks united, such as {" and ".join(file.stem for file in max(groups.values(), key=len)[:2])}'
        united = {place: dataclasses.replace(mask, path=os.path.dirname(mask.path)) for place, mask in united.items()}
    return ([(places[place], mask) for place, mask in united.items()], rule,
            [image for place, image in places.items() if place not in groups], [], [])


def unite(masks):
    """Several mask files of one image as one."""
    return dataclasses.replace(masks[0], path=UNITED.join(mask.path for mask in masks))


def unite_starred(images, masks, config):
    """Unite masks of one stem: of a folder where mask_pattern has a * (x_left.png, x_right.png), and of siblings where
    masks= ends in a * that images= lacks ("ManualMask/*Mask"), but not where images lie in such folders too."""
    folder = lambda file: os.path.dirname(file.path)
    if '*' in (config['mask_pattern'] or ''):
        masks = [*map(unite, grouped(masks, lambda mask: (mask.split, folder(mask), mask.stem)).values())]
    of_masks, of_images = (config[key] or '' for key in ('masks', 'images'))
    is_meant = '*' in posixpath.basename(of_masks) and of_masks.count('*') - of_images.count('*') == 1
    names = ({os.path.basename(folder(file)) for file in files} for files in (images, masks))
    if not is_meant or set.intersection(*names):                       # */data/001 has */masks/001
        return masks
    groups = grouped(masks, lambda mask: (mask.split, os.path.dirname(folder(mask)), mask.stem)).values()
    above = lambda mask: dataclasses.replace(mask, rest=posixpath.dirname(mask.rest))      # where its image is
    return [mask for group in groups for mask in
            ([above(unite(group))] if len({*map(folder, group)}) == len(group) else group)]


def unite_numbered(pairs, images, masks, config, notes):
    """Unite leftover masks x_mask_1 with the paired x_mask, or x_2 with the x_1 of the image x -> (pairs, masks still
    left over). Not one that may be of a leftover image x_1; and none, with a note, if masks of the first three unions
    overlap, as drawings of several people do."""
    place = lambda mask: (os.path.dirname(mask.path), re.sub(r'[-_ ]\d+$', '', mask.stem))
    further, united, left = grouped(masks, place), [], {place(image)[1] for image in images}
    for image, mask in pairs:
        folder, base = place(mask)
        is_first = base != mask.stem and bare(base) == bare(image.stem)
        key, word = (folder, base if is_first else mask.stem), re.search(r'[^\W\d_]*$', mask.stem)[0]
        is_part = key in further and (is_first or word.casefold() in MASK_WORDS)       # else 7_1 is no part of 7
        united.append((image, unite([mask, *(further.pop(key) if is_part and image.stem not in left else ())])))
    several = [(image, mask.path.split(UNITED)) for (image, mask), (_, one) in zip(united, pairs) if mask != one]
    try:
        for _, parts in several[:3]:
            read_mask(UNITED.join(parts), config)
    except DataError as error:
        notes += error.problems
        return pairs, masks
    kinds = {(*(re.findall(r'\d*$', os.path.splitext(part)[0])[0] for part in parts),) for _, parts in several}
    if len(kinds) == 1 < len(several) == len(united):                  # objects are more here, fewer there
        first = os.path.basename(several[0][1][0]).replace(several[0][0].stem, '{stem}', 1)
        line = as_typed('mask_pattern', first) if '{stem}' in first else 'by image_pattern and mask_pattern'
        notes.append(f'each image has {len(several[0][1])} masks, which are united: one class; if they are of classes '
                     f'or by several people, take one kind: {line}')
    return united, [mask for mask in masks if place(mask) in further]


def read_table(path, is_needed=True):
    """A csv with columns for images and masks -> its rows as dicts. DataError for others, or () unless `is_needed`."""
    try:
        with open(path, newline='', encoding='utf-8-sig') as file:
            head = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(',;\t', key=head.count), skipinitialspace=True)       # Excel: ;
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            roles = [name if may_be_read(name) else told_role(name) for name in reader.fieldnames]
            if roles.count('image') > 1:                               # image_id beside image_path
                roles = [role * (not name.endswith('_id')) for role, name in zip(roles, reader.fieldnames)]
            if roles.count('mask') == 1 and len(roles) == 2:           # a header such as xrays,masks
                roles = [role or 'image' for role in roles]
            if roles.count('image') == roles.count('mask') == 1:       # a header such as image_path,label
                reader.fieldnames = [role or name for role, name in zip(roles, reader.fieldnames)]
            table = list(reader) if {'image', 'mask'} <= set(reader.fieldnames) else ()    # other tables may be large
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        advice = '; save it as UTF-8' if isinstance(error, UnicodeDecodeError) else ''
        raise DataError(f'{path}: cannot be read as csv: {error}{advice}') from None
    if not table and is_needed:
        there = f'; its first line is {head.strip()[:100]}' if head.strip() else ''
        raise DataError(f'{path}: needs a header line image,mask or image,mask,split, and one line per image{there}')
    return table


def split_column(table):
    """The column of a list that tells the split: split, else the first with several splits, such as subset."""
    words = {name: {SPLIT_WORDS.get((row[name] or '').strip().lower()) for row in table}
             for name in table[0] if name not in (None, 'image', 'mask')}
    told = [name for name in words if 'train' in words[name] and len(words[name] - {None}) > 1]
    return 'split' if 'split' in words or not told else min(told, key=lambda name: None in words[name])


def read_tables(path):
    """{list file: (its rows, the split that its name tells)}. train.csv brings val.csv and test.csv along, without rows
    if they name no masks; any other list stands alone, without a split."""
    tables, word = {path: (read_table(path), '')}, re.compile(rf'(?<![a-z])({LONG_SPLIT_WORDS})(?![a-z])')
    alike = [other for other in sorted(path.parent.glob('*.[cC][sS][vV]'))
             if word.sub('', other.name.lower()) == word.sub('', path.name.lower()) and other.is_file()]
    repeats = lambda name: 'trainval' in name.lower()                  # what train.csv and val.csv list
    told = {other: SPLIT_WORDS[match[1]] for other in alike if (match := word.search(other.name.lower()))
            and (SPLIT_WORDS[match[1]] == 'test' or repeats(other.name) == repeats(path.name))}
    for other in told if told.get(path) == 'train' and len(told) > 1 else ():
        table = ()
        with contextlib.suppress(*[DataError] * (told[other] == 'test')):      # ids alone, whatever they are written in
            table = read_table(other, is_needed=False)
        is_used = other == path or any((row['mask'] or '').strip() for row in table)
        tables[other] = (table if is_used else (), told[other])
    return tables


def locate(path, first):
    """Where the files of a list are whose first image is `first` -> (folder, function (name, whether it is a mask) ->
    path relative to it): in the list's folder, or else the nearest one above in which the first image is found; if that
    is a name alone, in any folder below (of masks, if some are) that alone has a file of the name."""
    is_meant = lambda base, name: '\\' not in name or os.path.exists(os.path.join(base, name))
    there = lambda base, name: name if is_meant(base, name) else name.replace('\\', '/')     # a list made on Windows
    base = next((folder for folder in (path.parent, *path.absolute().parents)
                 if os.path.isfile(folder / there(folder, first))), None)
    below, has_masks = {}, False
    if base is None and first and os.path.basename(first) == first:
        found = grouped(list_files(path.parent), lambda place: (read_place(place[0])[1] == 'mask', place[1]))
        below = {key: posixpath.join(*places[0]) for key, places in found.items() if len(places) == 1}
        has_masks = any(is_mask for is_mask, _ in found)
    base = base or path.parent
    return base, lambda name, is_mask: below.get((is_mask and has_masks, name)) or there(base, name)


def read_list(path, skip_unpaired=False, mask_pattern=None, image_pattern=None, val_fraction=1, most=None):
    """A csv with the columns image, mask, perhaps split, its first `most` lines -> (pairs, rule). See locate."""
    pairs, problems, unpaired, tables = [], [], 0, read_tables(path)
    used = [file for file, (table, _) in tables.items() if table]
    stem_of = stem_in(image_pattern or '{stem}.*')                     # of a split.csv as in the run that wrote it
    base, located = locate(path, next(filter(None, ((row['image'] or '').strip() for row in tables[path][0])), ''))
    columns = {file: 'split' if told else split_column(table) for file, (table, told) in tables.items()}
    lines = [(file, told, *line) for file, (table, told) in tables.items() for line in enumerate(table[:most], 2)]
    for file, told, number, row in lines:
        image, mask, split = ((row.get(key) or '').strip() for key in ('image', 'mask', columns[file]))
        image, mask = located(image, False), located(mask, True)
        if split.lower() not in {'', *SPLIT_WORDS}:
            problems.append(f'{file}, line {number}: split={split!r}: choose from train, val, test')
        unpaired += bool(image and not mask)
        if not mask and (skip_unpaired or not image):                  # Excel leaves lines of ,, alone
            continue
        if not image or not mask or any(map(str.strip, row.get(None) or ())):
            problems.append(f'{file}, line {number}: image and mask must both be given' if not image or not mask else
                            f'{file}, line {number}: has more columns than the first line names')
            continue
        split = SPLIT_WORDS.get(split.lower(), told)
        pair = [Found(os.path.join(base, name), stem_of(os.path.basename(name)) or Path(name).stem, split,
                      rest=os.path.dirname(name))
                for name in (image, mask)]
        gone = [found.path for found in pair if not os.path.exists(found.path)]
        unpaired += bool(gone)
        if gone and skip_unpaired:
            continue
        problems += [f'{file}, line {number}: there is no {name}' for name in gone]
        problems += [f'{file}, line {number}: {image} would be an image and its mask at once'] * \
            (Path(mask) in (Path(image), *[Path(image).parent] * (not mask_pattern)))
        pairs += [] if gone else [pair]
    if not problems:                                                   # realpath raises for names with a NUL
        times = Counter(os.path.realpath(image.path) for image, _ in pairs)
        problems = [f'{" and ".join(map(str, used))}: {image} is listed {count} times'
                    for image, count in times.items() if count > 1]
    if val_fraction and pairs and not {image.split for image, _ in pairs} & {'', 'train'}:     # in folders: doubts
        problems.append(f'{path}: no line has split=train; leave the column out for a split by chance')
    if problems:
        what = f'{counted(unpaired, "line")} without a mask, or whose files are not there,'
        advice = [f'to leave out {what} type skip_unpaired=True'] if pairs and unpaired else []
        raise DataError([*shorten(problems), *advice])
    if not pairs:
        raise DataError(f'{path}: no line names an image and its mask')
    rule = f'the list{"s" * (len(used) > 1)} {" and ".join(file.name for file in used)}'
    rests = [f'{image.rest}/'.replace(os.sep, '/') for image, _ in pairs]
    begin = shared_start(rests).rfind('/') + 1                         # ~/dev/ around all is for no validation
    cuts = [begin * os.path.isabs(image.rest) for image, _ in pairs]   # of a split.csv as the run that wrote it had it
    pairs = [(dataclasses.replace(image, kind=image.rest[:cut], rest=image.rest[cut:]), mask)
             for (image, mask), cut in zip(pairs, cuts)]
    ways = [[read_place(rest[cut:])[0] for rest in rests] for cut in (begin, 0)]       # train/val/ in train/
    named = next((way for way in ways if 'train' in way), ways[0])
    if not any(image.split for image, _ in pairs) and 'train' in named and len({*named} - {''}) > 1:
        pairs = [(dataclasses.replace(image, split=split), mask) for (image, mask), split in zip(pairs, named)]
        rule += ', its folders the split'
    left_out = [f'{file.name}, in which no masks are named' for file in tables if file not in used]
    left_out += [f'{counted(unpaired, "line")} for want of a file'] * bool(unpaired)
    unread = {name for file in used for name in tables[file][0][0] if name} - {'image', 'mask', *columns.values()}
    left_out += [f'its column{"s" * (len(unread) > 1)} {", ".join(shorten(sorted(unread), 4))}'] * bool(unread)
    return pairs, rule + f', without {" and ".join(left_out)}' * bool(left_out)


class Line(str):
    """A line that knows more than it says: the lines that '... and 5 more' stands for (`hidden`), or the sizes (H, W)
    of a mask and its image, which differ (`sizes`)."""


def shorten(lines, most=10):
    """The first lines, and how many more there are."""
    lines = list(lines)
    more = Line(f'... and {len(lines) - most} more')
    more.hidden = lines[most:]
    return [*lines[:most], more] if more.hidden else lines


def find_pairs(config):
    """All pairs of a data set and their splits. DataError names files without a partner, and what to type instead."""
    lone = [key for key in ('images', 'masks', 'image_pattern', 'mask_pattern') if config[key]]
    if lone and config['data'] == 'demo':
        raise ConfigError(f'{", ".join(lone)}: without data; type data=PATH too (data=. is this folder)')
    root = write_demo(DEMO_FOLDER) if config['data'] == 'demo' else Path(os.path.expanduser(config['data']))
    if root.suffix.lower() == '.csv' and root.is_file():
        keys = 'skip_unpaired', 'mask_pattern', 'image_pattern', 'val_fraction'                # 0 in evaluate
        (pairs, rule), files = read_list(root, *map(config.get, keys)), []
        notes = [f'{key}: no effect, the list names the files' for key in lone if key in ('images', 'masks')]
    else:
        files = list_files(existing_folder(root))
        try:
            pairs, rule, notes = pair_files(config, root, files)
            if not lone:
                refuse_swapped(pairs, config)
            notes += doubts_of_unions(pairs, config, root, files)
        except DataError as error:
            with contextlib.suppress(DataError):                       # of those that do pair, not in the next run only
                some, *_ = pair_files(config | {'skip_unpaired': True}, root, files)
                error.problems += problems_of_files(some, config)
            raise DataError([*error.problems, *lines_that_pair(config, root, files)], error.title) from None
        pairs = split_by_names(pairs, root, files, notes)
        is_split = any(image.split for image, _ in pairs)
        listed = lists_there(root, files, 1000 if is_split else None)
        if not (config['image_pattern'] or config['mask_pattern']):
            refuse_other_pairs(pairs, listed)
        if not is_split:
            notes += [f'if the split of {rule} is meant type {line}'
                      for line, (others, rule) in listed.items() if any(image.split for image, _ in others)]
    if selves := [image.path for image, mask in pairs if image.path == mask.path]:
        raise DataError([f'{selves[0]}: would be an image and its mask at once', *lines_that_pair(config, root, files)])
    try:
        splits, drawn = choose_splits([image for image, _ in pairs], config)
    except DataError as error:                                         # one pair: perhaps a stack in a single file
        raise DataError([*error.problems, *problems_of_files(pairs[:8], config)], error.title) from None
    named = [os.path.join(root, *place) for place in files if CLASS_LIST.fullmatch(place[1])]
    lists = tuple(path for path in named if os.path.isfile(path))      # a pipe would be waited for
    notes += doubts(pairs, splits, config) + doubts_of_lists(pairs, root, files)
    return Pairs(*paths_of(pairs), splits, drawn, rule, notes, lists)


def refuse_other_pairs(pairs, lists):
    """DataError where a list, as lists_there finds them, gives an image a mask that by its name is another image's."""
    mask_of = {os.path.abspath(image.path): os.path.abspath(mask.path) for image, mask in pairs if lists}
    masks = {*mask_of.values()}
    for line, (listed, rule) in lists.items():
        places = [[os.path.abspath(file.path) for file in pair] for pair in listed]
        other = [(image, mask) for image, mask in places if mask in masks and mask_of.get(image, mask) != mask]
        if other:
            image, mask = other[0]
            raise DataError([f'{rule} gives {image} the mask {mask}, its name {mask_of[image]} '
                             f'({counted(len(other), "such image")})',
                             f'to go by the list type {line}; by the names, type mask_pattern too or move the list'])


def doubts_of_lists(pairs, root, files):
    """[a note] where folders whose images are taken together have class lists of their own, which differ."""
    lists = [place for place in files if CLASS_LIST.fullmatch(re.sub('[.]json$', '.txt', place[1]))]
    within = {above for place in {os.path.dirname(relative(image.path, root)) for image, _ in pairs if lists}
              for above in itertools.accumulate(Path(place).parts, posixpath.join)}
    times = Counter(folder for folder, _ in lists)                     # many: x_label.json is of x.png
    for places in grouped(lists, lambda place: place[1].lower()).values():
        held = [os.path.join(root, folder, name) for folder, name in places if folder in within and times[folder] < 4]
        if other := next((path for path in held[1:] if lines_of(path) != lines_of(held[0])), None):
            place = os.path.dirname(held[0]) + os.sep                  # the masks may be a tree of their own
            has_masks = any(mask.path.startswith(place) for _, mask in pairs)
            line = ', as in ' + as_typed('data', Path(place), True)
            return [f'{held[0]} and {other} differ: if a number is one class here and another there, name one of '
                    f'these folders{line * has_masks}']
    return []


def doubts(pairs, splits, config):
    """Notes on doubtful pairs and splits: images in no split, one mask for many images, groups that are torn apart."""
    images, notes = [image for image, _ in pairs], []
    named = {image.split for image in images} - {''}
    if any(image.split in ('val', 'test') and image.split != SPLITS[split] for image, split in zip(images, splits)):
        notes.append('no image is named for training: all of them were split afresh')
        named = set()
    words = lambda image: {*folder_words(f'{image.rest} {image.kind} {image.stem}')}
    theirs = lambda image, mask: '/'.join(part for part in mask.rest.split('/') if re.search('[A-Za-z]{3}', part)
                                          and {*words(image), *SPLIT_WORDS}.isdisjoint(folder_words(part)))
    some = itertools.starmap(theirs, pairs[::len(pairs) // 5000 + 1])
    tasks = {re.sub(r'\d', '', name): name for name in some}           # p1/, p2/ are no tasks
    if 1 < len(tasks) <= min(4, len(pairs) / 3) and '' not in tasks:
        notes.append(f'masks lie in {" and in ".join(sorted(tasks.values()))}, which the folders of the images do '
                     'not tell: if these are several tasks, name one of them in masks=, with images= and '
                     'skip_unpaired=True')
    are_named = lambda file: bool(RESULT_WORD.search(os.path.basename(file.path)))
    named_so = [are_named(mask) and not are_named(image) for image, mask in pairs]
    made = [mask.path for (_, mask), split in zip(itertools.compress(pairs, named_so), splits[named_so])
            if SPLITS[split] != 'train']
    if made and not all(named_so):
        notes.append(f'{counted(len(made), "mask")}, such as {made[0]}, by their names are results of a program: a '
                     'score on them is no score against the truth')
    mask, count = Counter(mask.path for _, mask in pairs).most_common(1)[0]
    if count > 1:
        notes.append(f'{count} images have one and the same mask: {mask}')
    unnamed = [image.path for image in images if not image.split]
    if unnamed and named:
        notes.append(f'{len(unnamed)} images, such as {unnamed[0]}, are in no split by name: they are '
                     f'{"trained on" if "val" in named or not config["val_fraction"] else "split by chance"}')
    if 'val' in named and config['val_fraction'] != AS_DELIVERED['val_fraction']:
        notes.append(f'val_fraction={config["val_fraction"]:g}: no effect, the data have a split of their own')
    if 'val' not in named and not config['group_pattern']:
        notes += doubts_of_groups([image for image, split in zip(images, splits) if SPLITS[split] != 'test'])
    roboflow = '(.*)[.]rf[.]' if all('.rf.' in image.stem for image in images) else '^[^.]*'
    pattern = config['group_pattern'] or roboflow                      # x.rf.1 and x.rf.2 are versions of one photo x
    sides = {(group_of(image, pattern, SPLITS[split] != 'test'), split) for image, split in zip(images, splits)
             if config['group_pattern'] or '.rf.' in image.stem}
    counts = Counter(group for group, _ in sides if group is not None)
    if torn := sum(number > 1 for number in counts.values()):
        advice = f'; type {as_typed("group_pattern", pattern)}' * (not config['group_pattern'] and 'val' not in named)
        notes.append(f'{torn} of {len(counts)} groups of images ({pattern}) are on several sides of the split: scores '
                     f'flatter{advice}')
    return notes


def doubts_of_unions(pairs, config, root, files):
    """[a note] where folders of united masks hold a few names again and again, as those of classes do, not objects, or
    masks that show the same places, as those of several people do."""
    if config['mask_pattern'] or not os.path.isdir(pairs[0][1].path):
        return []
    held = [(image, name) for image, mask in pairs for name in os.listdir(mask.path) if may_be_read(name)]
    usual = {name for name, count in Counter(name for _, name in held).items() if count > len(pairs) / 2}
    kind_of = lambda image, name: name if name in usual else name.replace(image.stem, '{stem}', 1)     # 1_car.png of 1
    names = Counter(itertools.starmap(kind_of, held))
    are_twice = all(share_drawn_twice(mask.path, config) > 1 / 2 for _, mask in pairs[::len(pairs) // 3 + 1])
    kinds = [name for name, count in sorted(names.items(), key=lambda item: (-item[1], item[0]))
             if count > max(1, len(pairs) / 10) and (are_twice or re.match(r'\D*$', name))]
    if len(kinds) < 2 or sum(map(names.get, kinds)) < names.total() / 2:
        return []
    pattern, line = kinds[0] if '{stem}' in kinds[0] else '{stem}' + kinds[0], ''
    with contextlib.suppress(DataError):
        found, _, _ = pair_files(config | {'mask_pattern': pattern}, root, files)
        if {kind_of(image, os.path.basename(mask.path)) for image, mask in found} == {kinds[0]}:
            line = f'; for one of them type {as_typed("mask_pattern", pattern)}'
    said = ' and '.join(shorten((os.path.splitext(kind)[0].removeprefix('{stem}').strip('-_ ') for kind in kinds), 4))
    why = ', although they show the same places, as masks by several people do, or objects that overlap' \
        if are_twice else ': one class, unless you draw them into one mask'
    return [f'{said} are united{why}{line}']


def share_drawn_twice(folder, config):
    """The share of the foreground of the masks in a folder that more than one of them shows; 0 if one is in another,
    as a cup is within its disc."""
    with contextlib.suppress(DataError, ValueError):                   # reported when all of them are read
        parts = (Coding(None, 0).encode(read_mask(os.path.join(folder, name), config)) == 1
                 for name in os.listdir(folder) if may_be_read(name))
        some = [*itertools.islice(parts, 9)]
        shown = np.add(sum(some), sum(parts))                          # the others one after the other
        are_nested = any((part <= other).all() for part, other in itertools.permutations(some, 2))
        return 0 if are_nested else (shown > 1).sum() / max(1, (shown > 0).sum())
    return 0


AUGMENTED = re.compile(r'(?<![a-z])(aug(mented)?|enhanced|[hv]?flip(ped)?|mirror(ed)?|rot(ated?|\d+)|blur[a-z]*|noisy|'
                       r'bright(?![-_ ]?field)[a-z]*|shear[a-z]*|jitter[a-z]*)(?![a-z])', re.IGNORECASE)


def doubts_of_groups(images):
    """[a note] if folders or names suggest groups that a random split would tear apart: the images of one patient or
    film, or an image and its augmented versions; else []."""
    first_number, last_number = '^[^0-9]*[0-9]+', '(?:.*[^0-9])?([0-9]+)'
    if told := [image.stem for image in images if AUGMENTED.search(f'{image.rest}/{image.stem}')]:
        ways = {pattern: groups_in(images, pattern, least=1) for pattern in (first_number, last_number)}
        is_first = ways[first_number] and all(re.search('[0-9]', AUGMENTED.split(stem)[0]) for stem in told)  # 1_aug_0
        pattern = first_number if is_first else max(ways, key=lambda pattern: len(ways[pattern]))      # not rot90_1
        pattern = without_words({image.stem for image in images}, told) or ways[pattern] and pattern
        line = f' type {as_typed("group_pattern", pattern)}' if pattern else ' a group_pattern is needed'
        return [f'the names tell of augmented images: so that those of one, such as {told[0]}, stay on one side of the '
                f'split{line}']
    folders, splits = Counter(image.rest for image in images if image.rest), {image.split for image in images}
    of_one = 'if each is of one patient, film or scan type'
    if len(splits) < len(folders) <= len(images) / 3 and folders.total() == len(images):   # more folders than splits
        return [f'the images lie in {len(folders)} folders, such as {os.path.dirname(images[0].path)}: {of_one} '
                f'{as_typed("group_pattern", "(.*)/")}']
    images = [*{image.stem: image for image in images}.values()]       # one name in several folders is no group
    for pattern, least in (('^[^-_ ]*', 0), ('(.*)[-_ ]', 0), (first_number, 2), ('^[^_]*', 2)):        # x-1, x-1_2
        if groups := groups_in(images, pattern, least):
            return [f'the names of the images begin in groups, such as {groups[0]}: {of_one} '
                    f'{as_typed("group_pattern", pattern)}']
    return []


def without_words(stems, told):
    """The group_pattern that takes words such as rotated_90_ from the front of stems, where many of those `told` to be
    augmented then are one with another; else ''."""
    begin = re.compile(rf'({AUGMENTED.pattern})[-_ ]?[0-9]*(?=[-_ ])', re.IGNORECASE)
    begins = list(filter(None, map(begin.match, told)))
    times = Counter(match[0] for match in begins)
    seen = {match[1] for match in begins} | {word for word in times if times[word] > max(2, len(told) / 20)}
    words = '|'.join(sorted(seen, key=lambda word: (-len(word), word)))        # letters, digits and -_ alone
    pattern = f'^(?:(?:{words})[-_ ])*(.*)'
    bases = {stem: re.search(pattern, stem)[1] for stem in stems}
    times = Counter(bases.values())
    return pattern if 10 * sum(times[bases[stem]] > 1 for stem in told if bases[stem] != stem) > len(told) else ''


def groups_in(images, pattern, least):
    """The group names, each with a digit, that this pattern finds in the stems, if all have one and the groups look
    real: about even, with `least` images or more each, or, if that is 0, three or more on average; else []."""
    found = [re.search(pattern, image.stem) for image in images]
    groups = Counter(match[match.lastindex or 0] for match in found if match and re.search(r'\d', match[0]))
    if groups.total() < len(images) or len(groups) < 2:
        return []
    mean, fewest, most = len(images) / len(groups), min(groups.values()), max(groups.values())
    are_even = fewest >= least and mean > 1.5 and most <= 1.5 * mean
    are_some = are_even if least else mean >= 3 and most < 0.6 * len(images)
    return [*groups] if are_some else []


def split_listed(name):
    """The split whose images a text file of this name lists: val.txt, eg1800_val.txt; None for other names."""
    first, *others = folder_words(name) if name.lower().endswith(('.txt', '.lst', '.csv')) else ['']
    told = [word for word in (first, *others) if word in SPLIT_WORDS and (word == first or len(word) > 2)]
    return SPLIT_WORDS[told[0]] if told else None


def tail_of(path, parts):
    """The last `parts` parts of a path, without the suffix of an image or mask (.v2 in scan.v2 is no such suffix)."""
    path = unicodedata.normalize('NFC', path.replace('\\', '/'))       # of a list made on Windows, of a Mac
    path = os.path.splitext(path)[0] if may_be_read(posixpath.basename(path)) else path
    return '/'.join(path.split('/')[-parts:])


def split_by_names(pairs, root, files, notes):
    """Pairs whose folders name no split get it from text files (train.txt, val.txt, or else eg1800_train.txt) that list
    nearly all images, or all but the training images, or from the first word of all names (train_1.png, testA_1.png);
    else they stay as they are."""
    lists = [place for place in files if split_listed(place[1]) and os.path.isfile(os.path.join(root, *place))]
    kinds = ' and '.join(sorted({f'*{os.path.splitext(name)[1]}' for _, name in lists}))
    why = f'{kinds}, as folders tell the split'
    if not all(image.split for image, _ in pairs):
        exact = [place for place in lists if Path(place[1]).stem.lower() in SPLIT_WORDS]         # not train_log.csv
        plain = [place for place in lists if folder_words(place[1])[0] in SPLIT_WORDS]     # not fold1_train.txt
        for side in (0, 1) if lists else (0,):                         # lists may name the masks
            paths = [pair[side].path for pair in pairs]
            parts = next((n for n in range(1, 9) if len({tail_of(path, n) for path in paths}) == len(paths)), 1)
            stems = [tail_of(path, parts) for path in paths]           # with folders, A/0, where B/0 exists too
            folders = {*map(os.path.dirname, paths)}                   # some in them may have no partner
            beside = (os.path.join(root, *place) for place in files * bool(lists) if may_be_read(place[1]))
            known = {*stems, *(tail_of(path, parts) for path in beside if os.path.dirname(path) in folders)}
            ways = [(some, *way) for some in (plain, lists, exact)
                    for way in ways_to_split(stems, some, root, parts, known)]
            for least, (some, how, listed) in itertools.product((1, 0.9), ways):       # a few may be in no list
                splits = splits_told(stems, [(pair[side].rest, pair[0].split) for pair in pairs], listed, known)
                torn = [name for name, told in listed.items() if told is None]         # in two lists, or a headline
                is_told = all(splits) or len(splits) - splits.count(None) >= least * len(splits) and len(torn) < 2 \
                    and not any(name in stem for name in torn for stem in stems)
                if is_told and {'train'} < {*splits} - {None}:
                    notes.append(f'the images are split by {how}')
                    left_out = [posixpath.join(*place) for place in lists if some is exact and place not in exact]
                    notes += tell_ignored({'which do not list every image once': left_out})
                    return [(dataclasses.replace(image, split=split or ''), mask)
                            for (image, mask), split in zip(pairs, splits)]
        why = f'{kinds}, which do not list nine in ten images once and so tell no split'
        wanted = {posixpath.basename(name) for _, how, names in ways if 'files' in how for name in names}
        used = {os.path.dirname(file.path) for pair in pairs for file in pair}
        meant = Counter(folder or '.' for folder, name in files * bool(wanted)
                        if may_be_read(name) and tail_of(name, 1) in wanted
                        and os.path.dirname(os.path.join(root, folder, name)) not in used)
        for folder, count in meant.most_common(1):
            if 2 * count > len(wanted) and read_place(folder)[1] != 'mask':        # tiles of the images, say
                both = ' '.join(as_typed(key, folder) for key in ('images', 'masks'))
                notes.append(f'the text files list images in {folder}, not these: if those are meant type {both}')
    notes += tell_ignored({why: [posixpath.join(*place) for place in lists]})
    return pairs


def ways_to_split(stems, lists, root, parts, known):
    """Splits by the first word of the stems, and by the text files of each folder -> [(what tells them, {stem: split}),
    ...], the likeliest first; None for a stem in two splits. `parts`: how many parts of a path make a stem; `known`:
    the stems, and those of files beside them."""
    ways = {}
    split_of = lambda stem: SPLIT_WORDS.get(folder_words(posixpath.basename(stem))[0])
    if all(map(split_of, stems)):                                      # mostly ends at the first stem
        ways['the first word of their names'] = {stem: split_of(stem) for stem in stems}
    halved = {folder for folder, name in lists if split_listed(name) == 'val'}
    for folder, name in lists:
        if folder in halved and re.search('(?i)train[-_]?val', name):  # it repeats train.txt and val.txt
            continue
        listed, split = ways.setdefault(f'the text files in {folder or "the top folder"}', {}), split_listed(name)
        try:
            text = Path(root, folder, name).read_bytes()
        except OSError as error:                                       # else chance would split them
            raise DataError(f'{Path(root, folder, name)}: cannot be read: {error.strerror}') from None
        code = 'utf-16' if text[:2] in (b'\xff\xfe', b'\xfe\xff') else 'utf-8-sig'     # PowerShell's >
        text = text.decode(code, 'replace')
        is_numbered = text[:1] in (',', ';', '\t')                     # by pandas: a column without a name is first
        for line in text.splitlines():
            first = [*re.split('[,;\t]', line)[is_numbered:], ''][0]
            words = [] if name.lower().endswith('.csv') else [line.strip(), *line.split()[:1]]
            words = [*filter(may_be_read, words[1:]), *words, first]   # of '1.png 2.png' the first, but 'my (1).png'
            found = [*filter(None, (tail_of(word.strip(' "'), parts) for word in words))]         # not of a blank line
            for stem in [stem for stem in found if stem in known][:1] or found:
                listed[stem] = split if listed.get(stem, split) == split else None
    return sorted(ways.items(), key=lambda way: ('train' not in way[1].values(), len(way[1])))     # VOC has many


def splits_told(stems, places, listed, known):
    """The split of each stem by `listed`, {name: split}, else that of its place, (rest, split); None where none tells
    it. A name may also be a folder in the rest, or lack what all stems begin or end with: 00000 means 00000_img. If no
    name is listed for training, and all are `known`, the stems that are not listed are for training."""
    films = [next((listed[part] for part in rest.split('/') if listed.get(part)), None) for rest, _ in places]
    if all(films) and not {*stems} <= listed.keys():                   # a list of films stands for all their frames
        return films
    told = [] if listed.keys() & set(stems) else [name for name in listed if name in stems[0]]
    before, _, after = stems[0].partition(max(told, key=len, default=stems[0]))
    lists_no_training = listed and listed.keys() <= known and not {'train', None} & {*listed.values()}
    others = 'train' if lists_no_training else None
    return [listed.get(stem.removeprefix(before).removesuffix(after)) or split or others
            for stem, (_, split) in zip(stems, places)]


def paths_of(pairs):
    """[(image, mask), ...] -> the paths of the images (N,) and of the masks (N,) as bytes."""
    return [np.array([os.fsencode(file.path) for file in side]) for side in zip(*pairs)]


def problems_of_files(pairs, config):
    """What is wrong with the files of these pairs."""
    return shorten(problem for _, problem in look_at(*paths_of(pairs), config) if problem)


def pair_files(config, root, files):
    """Images and masks among the files below root -> (pairs, rule, notes); DataError names what has no partner. If the
    last folder name that tells a role misleads (images/lab/, images/seg_01/), the first one is tried."""
    try:
        return pair_roles(config, root, files)[:3]
    except DataError as error:
        with contextlib.suppress(DataError):
            return pair_roles(config, root, files, which=0)[:3]
        raise error


def pair_roles(config, root, files, which=-1):
    """pair_files by `which` part of paths (read_place) -> (pairs, rule, notes, unpaired images, unpaired masks)."""
    images, masks, notes = collect(config, root, files, which)
    if not images or not masks:
        there = ', '.join(sorted(p.name for p in root.iterdir())[:12]) or 'nothing'
        raise DataError([f'{root}: found {len(images)} images and {len(masks)} masks; it holds {there}',
                         *shorten(notes, 5)])
    above = {file.rest for file in images}                             # photos/images/ and manual/images/: which?
    if {'image', 'mask'} <= {told_role(part) for rest in above for part in rest.split('/')}:
        raise DataError(f'several folders could hold the images: {", ".join(sorted(above)[:12])}')
    images = with_namesakes(images, masks, notes)
    for role, found in (('images', images), ('masks', masks)):         # of several tasks only the user knows which
        kinds = sorted({(file.split, file.kind) for file in found})    # by split: each may name its folders otherwise
        for several in grouped(kinds, lambda key: key[0]).values():
            if len({re.sub(r'\d', '', kind.lower()) for _, kind in several}) > 1:      # masks_1 and _2 are one kind
                names = ', '.join(kind or 'the folder itself' for _, kind in several)
                raise DataError(f'several folders could hold the {role}: {names}')
    found = unite_folders(images, masks) or match_pairs(images, unite_starred(images, masks, config))
    pairs, rule, images, masks, clashes = found
    pairs, masks = unite_numbered(pairs, images, masks, config, notes) if masks else (pairs, masks)
    is_tested = 'test' in {image.split for image, _ in pairs} or {'', 'test'} & {mask.split for mask in masks}
    if pairs and not is_tested:                                        # a contest does not publish its test masks
        of_test = [os.path.basename(image.path) for image in images if image.split == 'test']
        images = [image for image in images if image.split != 'test']
        notes += tell_ignored({'images of the test split, which has no masks': of_test})
    if several := [mask.path.split(UNITED) for _, mask in pairs if UNITED in mask.path]:
        rule += f', masks of an image united: {several[0][0]} and {several[0][1]}'
    problems = [f'several files share one stem: {", ".join(shorten(sorted(file.path for file in files), 4))}'
                for files in clashes]
    lonely = [f'image without a mask: {f.path}' for f in images] + [f'mask without an image: {f.path}' for f in masks]
    by_chance = rule != 'equal stems' and not config['mask_pattern'] and len(pairs) < min(len(images), len(masks))
    if 'the last number' in rule and not config['mask_pattern']:       # frame0002 is the first: mask_1 is of it
        by_chance |= 2 * min(len(images), len(masks)) > len(pairs)
    if problems or not pairs or lonely and (by_chance or not config['skip_unpaired']):
        found = f'{counted(len(pairs), "pair")} found{", perhaps by chance" * by_chance}'
        raise DataError([*shorten(problems + lonely), found, *shorten(notes, 5)], 'images and masks do not pair')
    if lonely:
        notes += [f'skipped {len(images)} images and {len(masks)} masks without a partner', *shorten(lonely, 3)]
    return pairs, rule, notes, images, masks


def with_namesakes(images, masks, notes):
    """The images without those of folders in which none is named as a mask is, where others of the same split are."""
    place = lambda image: (image.split, image.kind)
    if len({*map(place, images)}) == len({image.split for image in images}):   # one folder each, as in most sets
        return images
    stems = {bare(mask.stem) for mask in masks}
    named = {place(image) for image in images if bare(image.stem) in stems}
    splits = {split for split, _ in named}
    is_left_out = lambda image: place(image) not in named and image.split in splits
    others = [*filter(is_left_out, images)]
    unnamed = stems - {bare(image.stem) for image in images}
    if 2 * len(others) >= len(masks) or len(unnamed) >= len(others):   # their masks may be named otherwise
        return images
    for kind, files in grouped(others, lambda image: image.kind).items():
        notes += tell_ignored({f'in {kind or "the folder itself"}, where no name is that of a mask':
                               [os.path.basename(file.path) for file in files]})
    return [*itertools.filterfalse(is_left_out, images)]


SEARCH = 10                        # seconds of work after which no more folders and names are tried


def seconds_at_work():
    """Those of this thread, as others may keep the machine busy, and a third of the clock's, as drives may be slow."""
    return np.array([time.thread_time(), time.monotonic() / 3])


def unites_classes(answer):
    """Whether an Answer unites masks that do not sound like the halves of one thing, such as lungs."""
    return any(UNITED in mask and not re.search('(?i)left.*right', mask) for _, mask in answer.pairs)


def lines_of_copies(works, root):
    """The lines whose images are named as augmented ones, with the numbers of the fewer images of another line."""
    numbers = functools.cache(lambda line: {(*re.findall(r'\d+', os.path.basename(image)),)
                                            for image, _ in works[line].pairs})
    augmented = {line for line in works
                 if all(AUGMENTED.search(relative(image, root)) for image, _ in works[line].pairs)}

    def are_of(line, other):                                           # image_0_51 is of 0, but 20_007 not of 20_050
        rows = ({found[i:j] for i, j in itertools.combinations(range(len(found) + 1), 2)} for found in numbers(line))
        return works[other].is_whole and len(works[other].pairs) < len(works[line].pairs) \
            and all(not row.isdisjoint(numbers(other)) for row in rows)

    return {line for line in augmented if any(are_of(line, other) for other in works.keys() - augmented)}


def likeliest_lines(works, root):
    """Of {line: Answer} the lines to offer, the likeliest first."""
    in_all = lambda line: re.sub(rf'/({"|".join(SPLIT_WORDS)})(?=[/"])', '', line)         # mask/ for mask/train/
    works = {line: answer for line, answer in works.items() if not answer.pairs < works.get(in_all(line), answer).pairs}
    works, partners = without_crossed(works)
    of_program = lambda line: bool(RESULT_WORD.search(line.partition('mask')[2]))      # {stem}pred.png as masks
    places = lambda line: {os.path.dirname(file) for pair in works[line].pairs for file in pair}
    sides = lambda line: {read_place(relative(place, root))[0] for place in places(line)}
    in_tests = functools.cache(lambda line: sides(line) == {'test'})
    of_test = lambda line: in_tests(line) or 'test' in map(SPLIT_WORDS.get, re.findall('[a-z]+', line))
    copies = lines_of_copies(works, root)
    most = max((len(works[line].pairs) for line in works if not of_program(line) and line not in copies), default=0)
    plainest = lambda line: (of_test(line), of_program(line), line in copies, -len(works[line].pairs), 'skip_' in line,
                             'masks=' not in line, 'images="*"' in line, unites_classes(works[line]), len(line),
                             line.rfind('{stem}'))                     # the last: x_m.png is of x.png
    enough = [line for line in sorted(works, key=plainest)             # one folder of several may lack a few masks
              if len(works[line].pairs) >= (0.5 if 'masks=' in line else 0.75) * most]
    # those of a test, or of turned copies, come last and set no measure: their folders may have the better names
    kind = lambda line: (of_test(line), line in copies)
    best = max((works[line][:2] for line in enough if kind(line) == kind(enough[0])), default=None)
    images_of = lambda line: {image for image, _ in works[line].pairs}
    lines, known = [], set().union(*map(images_of, enough))            # of them a better kind of masks may show few
    few = [line for line in works if line in partners
           or ('masks=' in line or best and works[line].score > best[0]) and works[line].has_all_masks
           and images_of(line) <= known]
    for line in [*enough, *sorted(few, key=plainest)]:                 # with masks= files may be left over
        answer = works[line]
        is_best = answer[:2] >= best or answer.score >= best[0] and ('masks=' in line or not answer.leaves_images)
        if is_best and not any(answer.pairs <= works[other].pairs for other in lines):     # they are not all there
            lines.append(line)
    said = lambda line: 'masks=' not in line or 'mask' in map(told_role, re.split('[/"]', line.partition('masks=')[2]))
    lines.sort(key=said, reverse=True)                                 # mask/ before Otsu/, which may hold more
    holds = lambda line: [other for other in lines if works[other].pairs < works[line].pairs]
    for line in [line for line in enough if len(holds(line)) > 1][:1]:             # train/, val/ and predictions/
        lines = [line, *(other for other in lines if other not in holds(line))]
    masks_of = lambda line: frozenset(mask for _, mask in works[line].pairs)
    is_sound = lambda line: not SOUND_WORDS.isdisjoint(folder_words(line.partition(' masks=')[0]))
    return [line for line in lines if not is_sound(line)               # good/000 has no mask of the defects of bad/000
            or not any(masks_of(line) & masks_of(other) for other in lines if not is_sound(other))]


def lines_that_pair(config, root, files):
    """What to type instead: list files; then, of the settings that pair the most when tried, the likeliest; advice."""
    readable, begun = [file for file in files if may_be_read(file[1])], seconds_at_work()
    works = settings_that_pair(config, root, readable)
    in_time = '' if max(seconds_at_work() - begun) < SEARCH else ' in the time for it (data=FOLDER leaves fewer to try)'
    works = works or settings_that_pair(config | {'rescale_masks': 'stretch'}, root, readable)     # asked for next
    lines = likeliest_lines(works, root)
    masks_of = lambda line: frozenset(mask for _, mask in works[line].pairs)
    bands = ['if these are the bands of one image join them first, as one .tif or .npy, and type in_channels=...'] \
        * (max(Counter(map(masks_of, lines)).values(), default=0) > 1)         # other images have the same masks
    empty = ['images without a mask are left out; those that show nothing to find can be learnt from, once each has a '
             'mask of zeros'] * leave_images([*map(works.get, lines)], root, files)
    note = lambda line: ', masks united: one class' * any(UNITED in mask for mask in masks_of(line)) \
        + ', unless you draw them into one mask' * unites_classes(works[line])
    told = lambda line, pairs, note: f'    {line}   ({counted(len(pairs), "pair")}{note})'
    together = lines_of_kinds({line: works[line] for line in lines}, config, root, readable)
    lines = [told(line, works[line].pairs, note(line)) for line in lines]
    lines[5:5] = [told(line, *answer) for line, answer in together.items()]            # six are shown
    lines = [told(line, pairs, f', by {rule}') for line, (pairs, rule) in lists_there(root, files).items()] + lines
    if lines:
        lines = ['type one of these, each tried on your files:', *shorten(lines[:24], 6), *empty, *bands]
    else:
        typed = [f'{key}=none' for key in ('images', 'masks', 'image_pattern', 'mask_pattern') if config[key]]
        above = [] if config['images'] and config['masks'] else data_above(root)
        others = [f'others are tried with {" ".join(typed)}'] * bool(typed)            # a run's cannot be left out
        lines = above or others or [
            f'no folders or names were found{in_time} that pair them otherwise, as images/ and masks/ would; polygons, '
            'run lengths, volumes and stacks are to be drawn first, as a picture (or .npy, .mat) for each image']
    lines.append('a list file (data=list.csv, with the columns image,mask) tells how any other files belong together')
    return lines


def leave_images(answers, root, files):
    """Whether lines leave out images that may show nothing to find: some of the folders they name, or good/."""
    paired = {path for answer in answers for pair in answer.pairs for path in pair}
    rest = {folder for folder, name in files if os.path.join(root, folder, name) not in paired}
    return any(a.leaves_images for a in answers) or any(map(SOUND_WORDS.intersection, map(folder_words, rest)))


def without_crossed(works):
    """Lines that pair, without those of folders that pair wholly with others: of img/ and mask/ where img/ has its
    label/, and mask/ its image/ -> ({line: Answer}, lines of the sets that they cross)."""
    sides = {line: tuple(map(set, zip(*answer.pairs))) for line, answer in works.items() if 'masks=' in line}
    whole = [line for line in sides if 'skip_' not in line]
    crossed, partners = set(), set()
    for line in sides.keys() - whole:
        images, masks = sides[line]
        likely = [other for other in whole if works[other].score >= works[line].score]     # not overlay/ with edges/
        of_masks = [other for other in likely if masks <= sides[other][1] and images.isdisjoint(sides[other][0])]
        of_images = [other for other in likely if images <= sides[other][0] and masks.isdisjoint(sides[other][1])]
        if of_masks and of_images:
            crossed.add(line)
            partners |= {*of_masks, *of_images}
    return {line: answer for line, answer in works.items() if line not in crossed}, partners


def lines_of_kinds(works, config, root, files):
    """{line: (pairs, note)} that takes lines of `works` together: of Rust/, Rust_mask/ and of Blight/, Blight_mask/."""
    sides = {line: match.groups() for line in works if (match := re.fullmatch('images="(.*?)" masks="(.*?)"', line))}

    def starred(line):
        """* and *_mask of Rust and Rust_mask: * for what the mask's name holds besides words for masks."""
        word = re.escape(bare(posixpath.basename(sides[line][1])))
        return *(re.sub(f'(?i){word}(?=[^/]*$)', '*', side, count=1) for side in sides[line]),

    for (images, masks), lines in grouped(sides, starred).items():
        with contextlib.suppress(DataError):
            pairs = pair_roles(config | {'images': images, 'masks': masks}, root, files)[0]
            if len(pairs) == sum(len(works[line].pairs) for line in lines) > len(works[lines[0]].pairs):
                return {f'images="{images}" masks="{masks}"': (pairs, ', if these kinds mean the same')}
    return {}


def lists_there(root, files, most=None):
    """{line to type: (pairs, rule)} of the csv files that list images and masks, in the topmost folder with any csv.
    `most`: of the first lines alone, as each is looked for on the drive."""
    depth = lambda place: place[0].count('/') + bool(place[0])
    places = sorted((place for place in files if place[1].lower().endswith('.csv')),
                    key=lambda place: (depth(place), 'train' not in place[1].lower(), place))
    found, brought = {}, set()                                         # val.csv comes with train.csv
    for folder, name in [place for place in places if depth(place) == depth(places[0])][:20]:
        with contextlib.suppress(DataError):
            if (path := root / folder / name) not in brought and path.is_file():
                found[as_typed('data', path)] = read_list(path, most=most)
                brought.update(read_tables(path))
    return found


def data_above(root):
    """[the line to type] where data= names images/ alone, or images/480p, and masks/ or masks/480p lies beside it."""
    root = below = root.resolve()
    names_in = lambda folder: {bare(path.stem) for path in folder.glob('*')}
    with contextlib.suppress(OSError):
        root = root if told_role(root.name) else root.parent
        halves = [path for path in root.parent.iterdir() if path.is_dir()      # not sets, which hold such folders
                  and not any(told_role(inside.name) for inside in path.iterdir() if inside.is_dir())]
        others = [path for path in halves if {told_role(path.name), told_role(root.name)} == {'image', 'mask'}]
        if root in halves and any(root == below or names_in(path / below.name) & names_in(below) for path in others):
            return [f'the other half lies beside it: type {as_typed("data", root.parent)}']
    return []


def flatness(path, config):
    """The share of a file's pixels that have its 32 most frequent values: near 1 in masks, far below in photographs."""
    with contextlib.suppress(DataError, *UNREADABLE):                  # a folder has no header
        if math.prod(read_header(path, config)[:2]) > 2**24:           # too large to decode for a guess
            return 0.8                                                 # passes for either
    try:
        codes = read_mask(path, config).ravel()
    except DataError as error:                                         # fractions, many bands: no mask
        return 0.8 if re.search('mask_values=alpha|Git LFS', str(error)) else 0        # a cut-out, a pointer: either
    some = codes[::len(codes) // 2**18 + 1]
    return np.sort(np.unique(some, return_counts=True)[1])[-32:].sum() / len(some)


def refuse_swapped(pairs, config):
    """DataError where a word in their names makes photographs the masks: in Lucchi++ the images are mask0000.png."""
    images, masks = zip(*pairs[::len(pairs) // 3 + 1])
    is_told = config['mask_values'] or told_role(os.path.basename(os.path.dirname(images[0].path)))
    of_images, of_masks = ([flatness(file.path, config) for file in files]
                           if all(named_masks(masks)) and not is_told else [0] for files in (images, masks))
    if min(of_images) == 1 and max(of_masks) < 0.7:                    # dark images too have more than 32 values
        raise DataError(f'{masks[0].path} looks like a photograph and its image {images[0].path} like a mask: are they '
                        'swapped? If not, say what the masks hold in mask_values')


def size_in_header(path, config):
    """(height, width) of an image or a mask; None for arrays and folders, which have no such header. Raises one of
    UNREADABLE for a .npy that is no picture."""
    if path.lower().endswith('.npy') and UNITED not in path:
        read_header(path, config)
    with contextlib.suppress(DataError, *UNREADABLE):
        if not path.lower().endswith(('.npy', '.mat')):
            return read_header(path, config)[:2]


# how likely; whether no file is left over; {(image, mask)}; whether each mask found an image; whether images are left
Answer = namedtuple('Answer', 'score is_whole pairs has_all_masks leaves_images')


def settings_that_pair(config, root, files):
    """{line to type: Answer}, of settings that work."""
    works, shifted, begun = {}, set(), seconds_at_work()
    flat = functools.cache(lambda path: flatness(path, config))
    size = functools.cache(lambda path: size_in_header(path, config))
    held = Counter(os.path.dirname(os.path.join(root, *file)) for file in files)
    is_of_another = other_images(root, files)
    has_photos = any(flat(os.path.join(root, *file)) < 0.9 for file in files[::len(files) // 8 + 1])
    folders = () if config['images'] and config['masks'] else folder_answers(files, has_photos)        # not questioned
    answers = itertools.zip_longest(pattern_answers(files), folders)
    answers, again = [{}, *filter(None, itertools.chain.from_iterable(answers))], []
    for settings, which in itertools.chain(((settings, -1) for settings in answers), again):
        if max(seconds_at_work() - begun) > SEARCH:
            break
        try:
            pairs, rule, _, images, masks = pair_roles(config | settings | {'skip_unpaired': True}, root, files, which)
            some = [(image.path, mask.path) for image, mask in pairs[::len(pairs) // 3 + 1]]
            sizes = [(size(image), size(mask)) for image, mask in some]
        except (DataError, *UNREADABLE):                               # nothing pairs, or what does is no picture
            again += [(settings, 0)] * (which == -1)                   # pair_files tries that too
            continue
        if any(image.path in mask.path.split(UNITED) for image, mask in pairs) \
                or not any(None in two or same_shape(*two) or config['rescale_masks'] == 'stretch' for two in sizes):
            continue                                                   # no pair fits: not images and their masks
        if any(is_of_another(image.path, mask.path) for image, mask in pairs[::len(pairs) // 5000 + 1]):
            continue
        skip = bool(images or masks)
        image, mask = (file.path.split(UNITED)[0] for file in pairs[len(pairs) // 2])
        paired = {(image.path, mask.path) for image, mask in pairs}
        if skip and (paired <= shifted or are_numbered(pairs, images, masks)):
            shifted |= paired                                          # 1 to 10 beside 0 to 9: each pair would be wrong
            continue
        flat_images, flat_masks = (float(np.median([*map(flat, side)])) for side in zip(*some))
        differ = any(None not in two and len({*two}) > 1 for two in sizes)
        score = likelihood(image, mask, flat_images, flat_masks) - differ / 2
        score -= skip and rule.startswith('the last number')           # 003 of the good ones, and of the broken ones
        unions = [mask.path for _, mask in pairs[::len(pairs) // 20 + 1] if UNITED in mask.path]
        if not all(map(flat, unions)):
            continue                                                   # masks that overlap: drawn by several people
        where = {os.path.dirname(file.path) for pair in pairs for file in pair} if 'masks' in settings else held
        digits = [re.findall(r'\d+', settings.get(f'{role}_pattern', '')) for role in ('image', 'mask')]
        most = 20 if digits[0] == digits[1] else 10                    # frame 8 of each film with its frame 0
        is_chance = settings and (most * len(pairs) < sum(held[place] for place in where)
                                  or digits[0] != digits[1] and len(pairs) == 1)
        are_masks = has_photos and flat_images == 1
        is_nearly_paired = not settings and (4 * len(images + masks) < len(pairs)       # as it pairs unasked
                                             or rule == 'equal stems' and not masks)
        least = 0 if skip and not is_nearly_paired and not config['masks'] else -4         # typed: not questioned
        if score > least and not is_chance and not are_masks:
            tried = settings | {'skip_unpaired': True} if skip else settings
            line = ' '.join(as_typed(key, value, isinstance(value, str)) for key, value in tried.items())
            works[line] = Answer(score, not skip, paired, not masks, bool(images))
    return works


def words_in(path):
    """The folders of a path, the name of its file without the suffix, and all words in them: p1_7 holds p1 and p."""
    path = os.path.splitext(path.lower())[0]
    return {*path.split('/'), *re.findall(r'[^\W\d_]+\d*', path), *re.findall(r'[^\W\d_]+', path)}


def other_images(root, files):
    """A function: image, mask -> whether names tell that the mask is of another image: 7_0_mask.png, where 7_0.jpg lies
    beside the image 7_6.jpg, or clipA_1_mask.png, where the image is clipB/1.jpg or clipB_1.jpg."""
    there = Counter(posixpath.join(folder, bare(name)).lower() for folder, name in files)
    roles = {folder: read_place(folder)[1] for folder, _ in files}
    mask_role = 'mask' if 'mask' in roles.values() else ''
    of_image_role = {posixpath.join(*file).lower() for file in files if roles[file[0]] == 'image'}
    of_images, of_masks = ({word for file in files if (roles[file[0]] == mask_role) is are_masks
                            for word in words_in(posixpath.join(*file))} for are_masks in (False, True))
    clips = {part for folder, role in roles.items() if role != mask_role for part in folder.lower().split('/')
             if not part.isdigit() and not told_role(part) and part not in SPLIT_WORDS}        # perhaps without a mask

    def is_of_another(image, mask):
        image, mask = (relative(path, root).replace(os.sep, '/').lower() for path in (image, mask))
        (folder, name), (place, mask_name) = map(posixpath.split, (image, mask))
        (stem, suffix), (mask_stem, _) = map(os.path.splitext, (name, mask_name))
        namesake, itself = posixpath.join(folder, bare(mask_stem) + suffix), posixpath.join(place, bare(mask_name))
        mine, other = words_in(image) - words_in(mask), words_in(mask) - words_in(image)
        ours, theirs = ({*way.split('/')} - {''} for way in (folder, place))           # tissue/ is not of cell/
        swaps = itertools.product(ours - theirs, theirs - ours)
        rivals = {posixpath.join(folder.replace(*swap), name) for swap in swaps} - {mask}
        return rivals & of_image_role or bare(mask_stem) != bare(stem) and there[namesake] > (namesake == itself) \
            or mine & of_masks and other & of_images \
            or other & words_in(mask_name) & clips - {posixpath.basename(place)}
    return is_of_another


def are_numbered(pairs, images, masks):
    """Whether the images and masks left over suggest that numbers paired the wrong files, as when images count from 1
    and masks from 0. That is: one mask is left over, numbered just before the first image; or as many images as masks
    are, and these are half as many as the pairs, whose names differ in mere numbers, or shifting all images' numbers by
    one would pair more."""
    numbers_in = lambda files: sorted(int(n[-1]) for file in files if (n := re.findall(r'\d+', file.stem)))
    numbers = numbers_in(image for image, _ in pairs)
    is_first = bool(images) and [mask.stem for mask in masks] == [re.sub(r'[\W\d_]+$', '', pairs[0][1].stem)]
    before = numbers_in(masks) or [0] * is_first                       # of Labels, Labels [1] the first has no number
    if numbers and before == [numbers[0] - 1] != numbers_in(images):
        return True
    of_images, of_masks = (numbers_in([*side, *left]) for side, left in zip(zip(*pairs), (images, masks)))
    first, second = pairs[0]
    is_count = lambda numbers: numbers[:1] in ([0], [1]) and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    if images and masks and second.stem.startswith('Label_') and is_count(of_masks) and not is_count(of_images):
        return True                                                    # MATLAB's Label_7 is of the seventh image
    if len(images) != len(masks):
        return False
    words = {re.sub(r'\d+$', '', image.stem) for image in [*next(zip(*pairs)), *images]}
    are_numbers = first.stem.isdigit() or len(words) == 1 and first.stem != second.stem            # frame_1 and mask_1
    if are_numbers and 2 * len(images) >= len(pairs):                  # frames 2, 4, 6 and masks 1, 2, 3
        return True
    shifted = [Counter(number + step for number in of_images) & Counter(of_masks) for step in (-1, 1)]
    return max(pairing.total() for pairing in shifted) > len(pairs)


def likelihood(image, mask, of_images, of_masks):
    """A score, higher is likelier: how much two paths sound like image and mask, by the words that only one of them
    has, and how much their flatness (of_images, of_masks) looks so."""
    image, mask = map(os.path.abspath, (image, mask))                  # one may be given so
    shared = len(os.path.commonpath([image, mask])) if Path(image).drive == Path(mask).drive else 0
    of_image, of_mask = ({word for part in Path(path[shared:]).parts for word in folder_words(part)}
                         for path in (image, mask))
    if of_mask & MASK_WORDS:                                           # gt_images/ holds masks
        of_mask -= IMAGE_WORDS
    of_image, of_mask = of_image - of_mask, of_mask - of_image
    of_several = {'manual': 1, 'watershed': 1, 'semantic': 1, 'semantics': 1, 'human': -0.5, 'tra': -0.5, 'old': -0.5}
    fits = sum({*map(of_several.get, of_mask & of_several.keys())}) + (of_images < 0.9) - 6 * (of_masks < 0.7)
    fits += bool(of_image & {'original', 'originals'}) / 2             # no word for images: TIF/ and PNG/ may hold both
    for said, meant, wrong in ((of_image, IMAGE_WORDS, MASK_WORDS), (of_mask, MASK_WORDS, IMAGE_WORDS)):
        fits += bool(said & meant) - 2 * bool(said & wrong) - 3 * bool(said & DERIVED_WORDS)
    fits -= 4 * bool(of_image & DERIVED_WORDS and image.startswith(os.path.dirname(mask) + '_'))   # masks_merged/
    (top, *others), (other_top, *_) = (Path(path[shared:].strip('/\\')).parts for path in (image, mask))
    fits -= 2 * (len(others) > 1 and not {told_role(top), told_role(other_top)} & {'image', 'mask'})     # two data sets
    splits, others = ({SPLIT_WORDS[word] for word in said & SPLIT_WORDS.keys()} for said in (of_image, of_mask))
    return fits - 6 if splits and others and splits != others else fits


def folder_shapes(files, shared):
    """Values for images= and masks= ("shapes"): paths of folders with * for numbers, splits, or a level with several
    folders -> ({shape: the folders it stands for}, those with the most files first; all folders there are)."""
    count, weight, depth = Counter(folder for folder, _ in files), Counter(), len(Path(shared).parts)
    everywhere = {path for folder in count for path in itertools.accumulate(Path(folder).parts, posixpath.join)}
    siblings = Counter(map(posixpath.dirname, everywhere))
    words = re.compile(rf'(\d+|(?<![A-Za-z])({"|".join(SPLIT_WORDS)})(set)?(?![A-Za-z]))+', re.IGNORECASE)
    for folder, number in count.items():
        names = Path(folder).parts
        stars = [*names[:depth], *(words.sub('*', name) for name in names[depth:])]
        stars[1:] = [re.sub(rf'(?<![A-Za-z]){re.escape(above)}', '*', star)            # Cod/Cod GT: Cod/* GT
                     for above, star in zip(stars, stars[1:])]
        above = ['*' if siblings['/'.join(names[:at])] > 1 or star != name else name
                 for at, (star, name) in enumerate(zip(stars, names))]
        for end in range(depth + 1, len(names) + 1):                   # for each folder on the way down
            shapes = [(*stars[:at], names[at], *stars[at + 1:end]) for at in range(end)]       # one level by its name
            shapes += [stars[:end], *((*above[:end - 1], last) for last in {names[end - 1], stars[end - 1]})]
            weight.update({'/'.join(shape): number for shape in shapes})
    usual = [shape for at, (shape, _) in enumerate(weight.most_common(400))        # of masks there may be many kinds
             if at < 60 or told_role(posixpath.basename(shape)) == 'image']
    stars_last = lambda shape: (not told_role(posixpath.basename(shape)), shape.count('/'),
                                '*' in posixpath.basename(shape), shape.count('*'), -len(shape))
    plainest = {}                                                      # {folders: the plainest shape for them}
    for shape in sorted(usual, key=stars_last):
        plainest.setdefault(frozenset(filter(matcher(shape), count)), shape)
    shapes = sorted(plainest.items(), key=lambda item: -weight[item[1]])
    return {shape: covered for covered, shape in shapes}, everywhere


def folder_answers(files, has_photos=True):
    """images= and masks= for any two folders that may belong together."""
    shared = shared_folder(files)
    shapes, everywhere = folder_shapes(files, shared)
    if top_pictures(files):                                            # x.jpg beside masks/ and other folders
        shapes['.'] = {''}
    role = {shape: read_place(shape[len(shared):].lstrip('/'))[1] for shape in shapes}
    if has_photos and {*role.values()} == {'mask'}:                    # below semantic_labeling/ the last name tells
        role = {shape: told_role(posixpath.basename(shape)) for shape in shapes}
    is_derived = lambda shape: 'image' in role.values() and DERIVED_WORDS & {*folder_words(shape)}       # an overlay
    in_name = lambda shape: IMAGE_WORDS & {*folder_words(posixpath.basename(shape))}       # seg_images/: of seg_masks/
    may_be_images = {shape for shape in shapes if role[shape] == 'image'
                     or not is_derived(shape) and (not role[shape] or in_name(shape))}
    kind = {shape: {*folder_words(posixpath.basename(shape))[:-1]} - IMAGE_WORDS - MASK_WORDS for shape in shapes}
    doubled = {}                                                       # {shape: the suffix of most of its files}
    for shape, covered in shapes.items():
        inside = [os.path.splitext(name) for folder, name in files if folder in covered]
        if len({*inside}) == len(inside) > len({stem for stem, _ in inside}):
            doubled[shape] = Counter(suffix for _, suffix in inside).most_common(1)[0][0]
    likeliest_first = lambda sides: (role[sides[1]] != 'mask', len({*map(posixpath.dirname, sides)}))     # time may end
    belong = set()
    for image, mask in sorted(itertools.permutations([*shapes][:24], 2), key=likeliest_first):
        overlap = shapes[image] & shapes[mask]
        if image not in may_be_images or 'mask' in role.values() and role[mask] == 'image' \
                or overlap and (overlap != shapes[mask] or role[mask] != 'mask'
                                and ('*' not in image or mask.startswith(image + '/'))):
            continue
        brothers = [kind[other] for other in shapes if posixpath.dirname(other) == posixpath.dirname(image)
                    and role[other] != 'mask' and shapes[other].isdisjoint(shapes[mask])
                    and re.sub(r'\d', '', other) != re.sub(r'\d', '', mask)]          # Maps1 and Maps2: by two people
        sisters = [kind[other] for other in shapes if posixpath.dirname(other) == posixpath.dirname(mask)
                   and role[other] == 'mask']
        is_of_others = kind[mask] and kind[mask] in brothers or kind[image] and kind[image] in sisters
        if kind[image] != kind[mask] and is_of_others:
            continue                                                   # normal_mask/ goes with normal/, not abnormal/
        first, second = (re.sub(r'\d', '', posixpath.basename(side)) for side in (image, mask))
        parts = zip(image.split('/')[::-1], mask.split('/')[::-1])
        numbers = zip(re.findall(r'\d+', image), re.findall(r'\d+', mask))
        twins = {twin for a, b in (*parts, *numbers) if '*' not in (a, b)
                 for twin in (image.replace(a, b), mask.replace(b, a))}
        starred = [re.sub(r'[^/]*/([^/]*)$', r'*/\1', side) for side in (image, mask)]         # tried themselves
        are_kinds = posixpath.dirname(image) == posixpath.dirname(mask) and not role[image] + role[mask] \
            and starred != [image, mask] and {*starred} <= shapes.keys()      # segmented/frog and /worm, as in color/
        if are_kinds or first == second != '' or twins & (everywhere | shapes.keys()) - {image, mask}:
            continue                                                   # masks/frog does not go with images/worm
        belong.add((image, mask))
        yield {'images': image, 'masks': mask}
        above = '/'.join(image.split('/')[:mask.count('/') + 1])
        if role[image] == 'image' and role[mask] == 'mask' and above not in shapes and not mask.startswith(above + '/'):
            yield {'images': above, 'masks': mask}                     # train/1/scans and train_masks/1/scans
        for side, pattern in ((image, 'image_pattern'), (mask, 'mask_pattern')):
            if side in doubled:                                        # 3.tif beside 3.jpg, which all others are
                yield {'images': image, 'masks': mask, pattern: '{stem}' + doubled[side]}
    of_masks = grouped([shape for shape in shapes if role[shape] == 'mask'], posixpath.dirname)
    for above, image in itertools.product([above for above, masks in of_masks.items() if len(masks) > 1], shapes):
        if belong & {(image, mask) for mask in of_masks[above]} \
                and not shapes[image] & set().union(*map(shapes.get, of_masks[above])):
            end = shared_start([mask[::-1] for mask in of_masks[above]])[::-1]
            word = max((word for word in MASK_WORDS if end.lower().endswith(word)), key=len, default='')
            yield {'images': image, 'masks': posixpath.join(above, f'*{end[len(end) - len(word):]}')}  # */*Mask


def pattern_answers(files):
    """mask_pattern, with or without image_pattern: by what names share, or for img.png and label.png in each folder."""
    folders, names = Counter(folder for folder, _ in files), Counter(name for _, name in files)
    same = ['{stem}' + name for name, count in names.items() if count > max(1, 0.4 * len(folders))]
    images = [file[::-1] for file in files if read_place(file[0])[1] != 'mask'] or [file[::-1] for file in files]
    places = [(len(images) * at // 9 + at) % len(images) for at in range(9 if images else 0)]
    examples = dict(images[at] for at in places)                       # some have no mask; + at: not all x_depth.png
    by_suffix, seen = grouped(sorted(names), lambda name: os.path.splitext(name)[1]), Counter()
    for image, folder in examples.items():
        (stem, suffix), clip = os.path.splitext(image), posixpath.basename(folder) + '_'
        for kind, others in by_suffix.items():
            others = [os.path.splitext(name)[0] for name in others if name != image]
            of_clips = not stem.startswith(clip) and any(other.startswith(clip) for other in others)
            for first, second in name_patterns(clip * of_clips + stem, others):    # clipA/1.jpg and clipA_1_mask.png
                if first.count('{stem}') == second.count('{stem}') == 1:
                    seen[first + suffix, second + kind] += 1
    whole = itertools.permutations(same if len(same) <= 8 else (), 2)
    for first, second in [*whole, *(pair for pair, _ in seen.most_common(12))]:
        yield {'mask_pattern': second}
        yield {'image_pattern': first, 'mask_pattern': second}
        yield {'image_pattern': second, 'mask_pattern': first}         # if the example was a mask
    most = max(seen.values(), default=0)
    usual = [pair for pair, count in seen.items() if 2 * count > most and pair[1].startswith('{stem}')]
    for first, kinds in grouped(usual, lambda pair: pair[0]).items():
        start = shared_start(seconds := [second for _, second in kinds])
        end = shared_start([second[len(start):][::-1] for second in seconds])[::-1]
        start, end = re.sub(r'[^\W\d_]+$', '', start), re.sub(r'^[^\W\d_]+', '', end)       # left and right: no *t
        if len(kinds) > 1 and start != '{stem}':                       # x_left.png and x_right.png
            yield {'mask_pattern': f'{start}*{end}'}
            yield {'image_pattern': first, 'mask_pattern': f'{start}*{end}'}


def group_of(image, pattern, is_needed=True):
    """The group of an image: what the pattern's parentheses match in its name, or the whole match if it has none. Where
    that is not found: None, but a DataError if it `is_needed`."""
    places = (image.stem, f'{image.rest or image.kind}/{image.stem}', os.path.basename(image.path),    # {stem}, or all
              posixpath.join(image.kind, image.rest, image.stem))      # of a list of whole paths
    match = next(filter(None, (re.search(pattern, place) for place in places)), None)
    if not match and is_needed:
        raise DataError(f"group_pattern={pattern!r} is not found in {image.path}; every name must hold it, "
                        f'as in {as_typed("group_pattern", "^[^_]*")} (what stands before the first _)')
    return match and (match.groups() or match.group())


def choose_splits(images, config):
    """Index into SPLITS of each image (N,), and whether chance chose it (N,). Images without a named split, or else the
    training images if none validate, are split by a seeded draw of groups. DataError if there is only one group."""
    train, val = SPLITS.index('train'), SPLITS.index('val')
    splits = np.array([SPLITS.index(image.split) if image.split else -1 for image in images], np.int8)
    if not {train, -1} & set(splits.tolist()) and config['val_fraction']:  # all of it is in val/ or test/
        splits[:] = -1
    fold, share = config['fold'], config['val_fraction']
    last = -1 if val in splits or not share else int(1.001 / share) - 1
    if fold > max(0, last):
        why = f'val_fraction={share:g} makes those from 0 to {last}' if last >= 0 else 'no split is drawn: type fold=0'
        raise ConfigError(f'fold={fold}: there is no such fold: {why}')
    if share == 0 or val in splits:
        return np.where(splits < 0, train, splits), np.zeros(len(splits), bool)
    pattern = config['group_pattern']
    for to_draw in ([-1], [-1, train]):                                # the second where the first makes one group
        drawn = np.isin(splits, to_draw)
        pool = np.flatnonzero(drawn)
        groups = list(grouped(pool, lambda row: group_of(images[row], pattern) if pattern else row).values())
        if len(groups) > 1:
            break
    if len(groups) < 2:
        several = f'{counted(len(pool), "image")} in {counted(len(groups), "group")}' + \
            f' (group_pattern={pattern!r})' * bool(pattern)
        raise DataError([f'{several} cannot be split into train and val',
                         'val_fraction=0 validates on the training images'])
    splits[pool] = train
    splits[hold_out(groups, len(pool), config)] = val
    return splits, drawn


def hold_out(groups, count, config):
    """The rows that validate: groups of rows, by a seeded draw, that together come close to val_fraction of `count`.
    Each fold takes of what the folds before it left, so that all together leave out no group."""
    left, before = [groups[n] for n in np.random.default_rng(config['seed']).permutation(len(groups))], 0
    for fold in range(config['fold'] + 1):
        held, rest, wanted = [], [], max(1, round((fold + 1) * config['val_fraction'] * count) - before)
        for group in left:
            fits = len(held) + len(group) / 2 <= wanted                # nearer to the share than without it
            if fits and (before or group is not left[-1]):             # one always trains
                held += group
            else:
                rest.append(group)
        left, before = rest, before + len(held)
    return held or min(groups, key=len)                                # all are too large


# ===== data: reading ==================================================================

UNREADABLE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, SyntaxError,
              EOFError, AssertionError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
              tokenize.TokenError, ImportError,       # what decoders have been seen to raise on damaged files
              getattr(zipfile.lzma, 'LZMAError', OSError))            # not every Python has it

ROTATED = 'carries a rotation (EXIF orientation), which is not applied to images of this kind; save it upright'

# What Pillow may open: no formats that are programs (PostScript would be run by Ghostscript).
PILLOW_FORMATS = ('PNG', 'JPEG', 'JPEG2000', 'BMP', 'DIB', 'GIF', 'WEBP', 'PPM', 'TIFF')

WINDOWED_ABOVE = 2**25             # pixels: larger TIFF files are read by rows where their layout allows it


def check_pixels(path, shape, config):
    """DataError for an image of shape (H, W[, bands]) above max_image_pixels; many bands count as more pixels."""
    (height, width, *bands), most = shape, config['max_image_pixels']
    pixels = max(height * width, math.ceil(math.prod(shape) / max(4, config['in_channels'])))
    if pixels > most:
        size = ' x '.join(map(str, [width, height, *bands]))
        raise DataError(f'{path}: {size} pixels is above max_image_pixels={most}; '
                        f'if it is no bomb, type max_image_pixels={pixels}')


DAMAGED = {b'version https://git-lfs': 'is a pointer of Git LFS, not the file: type  git lfs pull',
           b'\x89PNG\n': 'is a PNG whose line ends were converted, as git does with text: fetch it anew',
           b'\x89PNG': 'is a damaged PNG',
           b'PK\3\4': 'is an archive; of an .npz save the array alone with numpy.save, as .npy'}    # by how they begin


@contextlib.contextmanager
def pillow_as_it_was():
    """Put back afterwards what open_pillow sets for the whole process."""
    switches = (Image, 'MAX_IMAGE_PIXELS'), (ImageFile, 'LOAD_TRUNCATED_IMAGES')
    before = [getattr(*switch) for switch in switches]
    try:
        yield
    finally:
        for switch, value in zip(switches, before):
            setattr(*switch, value)


def open_pillow(path, config):
    """An opened, not yet decoded Pillow image."""
    Image.MAX_IMAGE_PIXELS = None                                      # check_pixels has a limit that users can set
    ImageFile.LOAD_TRUNCATED_IMAGES = False                            # a notebook's True makes grey of what is lost
    if not os.path.getsize(path):
        raise ValueError('is empty')
    try:
        picture = Image.open(path, formats=PILLOW_FORMATS)
    except UnidentifiedImageError:
        with open(path, 'rb') as file:
            start = file.read(23)
        for begins, words in DAMAGED.items():
            if start.startswith(begins):
                raise ValueError(words) from None
        raise UnidentifiedImageError('is no picture of a known format, whatever its name says') from None
    check_pixels(path, (picture.height, picture.width), config)
    if picture.format == 'TIFF':
        picture.filename = ''          # else Pillow may memory-map it, and gets the sides of a rotated one wrong
    if picture.format in ('GIF', 'PNG', 'WEBP') and (frames := getattr(picture, 'n_frames', 1)) > 1:
        raise ValueError(f'holds {frames} pictures, a film; save the one that is meant')
    if picture.format in ('BMP', 'DIB') and picture.mode == '1' and picture.tile[0][0] == 'raw':
        codec, box, start, (_, *rest) = picture.tile[0]                # Pillow reads 8 bits of two colours as 1 bit
        if rest[0] == (picture.width * 8 + 31) // 32 * 4 and picture.width > 4:
            picture.tile = [(codec, box, start, ('1;8', *rest))]
    return picture


def read_pillow(path, config, as_mask):
    """Decode with Pillow: masks keep their indices, images become what pillow_pixels makes of them."""
    with open_pillow(path, config) as picture:
        if picture.format == 'PNG':                                    # its end may be zeros, which decode as black
            open_pillow(path, config).verify()
        if pillow_mode(picture) == 'RGB48' and not (as_mask and config['mask_values'] == 'alpha'):
            if picture.getexif().get(274, 1) != 1:                     # behind the pixels too, which OpenCV may follow
                raise ValueError(ROTATED)
            content = np.fromfile(path, np.uint8)                      # cv2.imread wants ASCII names on Windows
            colours = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
            return colours[..., [2, 1, 0, 3] if colours.shape[2] == config['in_channels'] == 4 else [2, 1, 0]]
        ImageOps.exif_transpose(picture, in_place=True)                # scan_pair checks that a mask is turned alike
        if as_mask:
            return mask_pixels(picture, config)
        return pillow_pixels(picture, config['in_channels'], picture.format)


def names_colours(config):
    """Whether mask_values names nothing but colours: then the colours of palette masks count, not their numbers."""
    return isinstance(config['mask_values'], dict) and all(isinstance(code, str) for code in config['mask_values'])


def mask_pixels(picture, config):
    """An opened mask -> (H, W) numbers, or (H, W, 3) colours. ValueError if its shape is in the alpha channel alone."""
    if config['mask_values'] == 'alpha':
        if not picture.has_transparency_data:
            raise ValueError('has no alpha channel, which mask_values=alpha takes')
        return np.array(picture.convert('RGBA').getchannel('A'))
    used = palette_colours(picture) if picture.mode == 'P' and 'transparency' in picture.info else {}
    if len(used) > len({*used.values()}) == 1:                         # one colour: the shape is in what it leaves out
        picture = picture.convert('RGBA')
    low, high = picture.getchannel('A').getextrema() if picture.mode.endswith('A') else (255, 255)
    if low < 128:                                                      # not just a soft rim
        is_plain = len(picture.convert('RGB').getcolors(256) or ()) < 2        # None: the many of a photograph
        if is_plain and low < high:                                    # else it is empty
            raise ValueError('its shape is in the alpha channel; type mask_values=alpha')
        shown = picture.getchannel('A').point(lambda alpha: 255 * (alpha > 0))
        if shown.getbbox() or is_plain:                                # invisible pixels may be white: make them black
            picture = Image.composite(picture, Image.new(picture.mode, picture.size), shown)
    if picture.mode == 'P' and names_colours(config) and palette_meaning(picture) == 'P':
        codes = np.arange(256, dtype=np.int32)                         # ignore_index keeps its number
        for index, code in palette_colours(picture).items():
            if index != config['ignore_index'] or code in parse_mask_values(config['mask_values']):
                codes[index] = code
        return codes[np.array(picture)]
    if picture.mode in ('LA', 'P'):
        picture = picture.convert('L' if picture.mode == 'LA' else palette_meaning(picture))
    if len(picture.getbands()) > 1:
        picture = picture.convert('RGB')
    tags = picture.tag_v2 if picture.format == 'TIFF' else {}          # these two store numbers as they are given
    is_as_given = str(tags.get(270)).startswith('ImageJ') or str(tags.get(305)).startswith('tifffile')
    is_inverted = is_as_given and picture.mode == 'L' and tags.get(262) == 0       # 255 is shown as black
    return 255 - np.array(picture) if is_inverted else np.array(picture)


def palette_meaning(picture):
    """How a palette mask is meant -> the mode to convert it to. 'P': its numbers count, as in most. 'L': its greys
    count, in a GIF of greys, or in a mask of black and white if the palette holds nothing else or a number is above 63.
    'RGB': its colours count, as the palette was made for this file: black is not number 0, no number is left out, and
    the palette ends with them. (That is asked because one of classes may have black last, for what is ignored.)"""
    used, palette = palette_colours(picture), picture.getpalette('RGB')
    shown, last = set(used.values()), max(used, default=0)
    colours = {tuple(palette[at:at + 3]) for at in range(0, len(palette), 3)}
    greys = {*map(as_grey, shown)}
    if picture.format == 'GIF' and all(grey < COLOUR for grey in greys):
        return 'L'
    is_filled = palette[-6:-3] == palette[-3:]                         # up with one colour; 255 may show that
    if greys <= {0, 255} and ((255 in greys or not is_filled) and last > 63 or colours <= {(0, 0, 0), (255, 255, 255)}):
        return 'L'
    is_own = last < len(used) and len({tuple(palette[at:at + 3]) for at in range(3 * last + 3, len(palette), 3)}) < 2
    return 'RGB' if is_own and COLOUR in shown and palette[:3] != [0, 0, 0] else 'P'


def palette_colours(picture):
    """{index: its colour as a code} of the indices that a palette image holds."""
    palette = picture.getpalette('RGB')
    return {index: COLOUR + int.from_bytes(palette[3 * index:3 * index + 3], 'big')
            for _, index in picture.getcolors(256) if 3 * index + 3 <= len(palette)}


def orientation(picture):
    """How EXIF turns an opened image: 1 not at all, 2 to 8 mirrored or rotated."""
    turned = Image.Image.getexif(picture).get(274, 1)                  # a PNG's own getexif would decode it
    return turned if turned in range(1, 9) else 1                      # 0 is written too, and turns nothing


def pillow_mode(picture):
    """The mode of an opened image; 'RGB48' for a PNG, PPM or JPEG 2000 of 16 bits per colour, which Pillow would cut to
    8, 'I;16' for a grey one, which it may widen to 32."""
    raw = picture.tile[0][3] if picture.tile else ''
    if picture.format == 'JPEG2000' and picture.mode in ('RGB', 'RGBA'):
        with open(picture.filename, 'rb') as file:
            bits = re.search(rb'\xff\x4f\xff\x51.{38}(.)', file.read(2**20), re.DOTALL)      # marker SIZ: bits less 1
        raw = 'RGB;16B' if bits and bits[1][0] & 127 > 7 else raw
    if raw in ('RGB;16B', 'RGBA;16B', 'LA;16B', ('RGB', 65535)):
        return 'RGB48'
    return 'I;16' if picture.mode == 'I' and picture.format in ('PNG', 'PPM') else picture.mode


def pillow_pixels(picture, channels, kind):
    """A Pillow image -> (H, W) or (H, W, C): 16 bits and floats as stored, all else grey, RGB or RGBA of 8 bits."""
    if picture.mode.startswith(('I', 'F')):
        narrow = picture.mode == 'I' and kind in ('PNG', 'PPM')        # 16 bits, which Pillow widens
        return np.array(picture).astype(np.uint16) if narrow or picture.mode.startswith('I;16') else np.array(picture)
    mode = {1: 'L', 4: 'RGBA' if picture.mode == 'RGBA' else 'RGB'}.get(channels, 'RGB')
    return np.array(picture if picture.mode == mode else picture.convert(mode))        # convert would copy it


def pillow_sees_all(path, config):
    """Whether Pillow reads all of a TIFF: one page without gaps, grey or RGB bands of at most 8 bits, or one band of
    any depth that Pillow knows, which uint32 and int8 are not."""
    with contextlib.suppress(UnidentifiedImageError), open_pillow(path, config) as picture, open_tiff(path) as file:
        page, *others = itertools.islice(file.pages, len(file.pages))  # the last may name the first as its next
        check_pixels(path, page.chunks[:2], config)                    # a tile may be larger than the image
        bits, samples = np.max(page.bitspersample), page.samplesperpixel
        is_bool = bits == 1 and page.photometric == 0 and page.software.startswith('tifffile')     # else inverted
        is_sparse = 0 in page.databytecounts                           # Pillow would show the head of the file there
        is_swapped = file.byteorder == '>' and page.compression != 1 and bits > 8      # Pillow knows it of uint16 alone
        is_swapped &= (bits, page.sampleformat) != (16, 1)
        if is_bool or is_sparse or is_swapped or (bits, page.sampleformat) in ((32, 1), (8, 2)):       # it would wrap
            return False
        plain = samples == len(picture.getbands()) and bits <= 8 and 1 not in page.extrasamples
        return all(other.subfiletype & 5 for other in others) and (samples == 1 or plain)  # 1: a smaller copy, 4: mask
    return False


def open_tiff(path):
    """A TIFF as tifffile sees it, to be closed. Raises ValueError for one that is none."""
    try:
        return tifffile.TiffFile(path)
    except tifffile.TiffFileError as error:                            # no ValueError in older versions
        raise ValueError(str(error)) from None


@contextlib.contextmanager
def open_series(path, config):
    """The first image of a TIFF as tifffile sees it, not yet decoded -> (series, (H, W), axis of its bands or None)."""
    with open_tiff(path) as file:
        series = file.series[0]
        size = [series.shape[series.axes.index(axis)] for axis in 'YX']
        bands = [axis for axis, name in enumerate(series.axes) if name not in 'YX']
        if bands == [0] and series.shape[2] == config['in_channels'] != series.shape[0]:
            size, bands = series.shape[:2], [2]                        # (H, W, C), which tifffile writes as H pages
        check_pixels(path, (*size, math.prod(series.shape) // max(1, math.prod(size))), config)
        if file.pages[0].tags.valueof(274, 1) not in (0, 1):
            raise ValueError(ROTATED)
        if len(bands) > 1:
            raise ValueError(f'has the axes {series.axes}; only height, width and bands are understood')
        yield series, size, bands[0] if bands else None


def read_segment(path, page, index):
    """The stored bytes of a strip or tile of a TIFF. DataError if Deflate or LZMA unpack them to more than it holds."""
    page.parent.filehandle.seek(page.dataoffsets[index])
    data = page.parent.filehandle.read(page.databytecounts[index])
    most = math.prod(page.chunks) * page.dtype.itemsize
    unpack = zlib.decompressobj
    if page.compression == 34925:
        from lzma import LZMADecompressor as unpack                    # not in every Python
    if page.compression in (8, 32946, 34925) and len(unpack().decompress(data, most + 1)) > most:
        raise DataError(f'{path}: holds a strip that unpacks to more than its {most} bytes: damaged, or a bomb')
    return data


def read_tiff(path, config, as_mask):
    """TIFF: Pillow where it sees the whole image, tifffile for bands, planes and depths unknown to it."""
    if pillow_sees_all(path, config):
        array = read_pillow(path, config, as_mask)
    else:
        with open_series(path, config) as (series, _, bands):
            for page in filter(None, series.pages):
                check_pixels(path, page.chunks[:2], config)            # a tile may be larger than the image
                for index in range(len(page.dataoffsets)):             # refuses bombs, before tifffile unpacks them
                    read_segment(path, page, index)
            array = series.asarray() if bands is None else np.moveaxis(series.asarray(), bands, -1)
    if not as_mask and array.dtype.kind in 'fi':
        with open_tiff(path) as file:
            refuse_no_data(array, path, file.pages[0])
    return array


def refuse_no_data(array, path, page):
    """DataError for pixels that a TIFF calls missing, in depths of heights; in unsigned photographs it is a rim."""
    with contextlib.suppress(ValueError):
        missing = float(page.tags.valueof(42113, default=0)) if array.dtype.kind in 'fi' else 0
        if missing and (array == missing).any():
            raise DataError(f'{path}: holds pixels of no data ({missing:g}, GDAL_NODATA); fill or cut them first')


def open_npy(path, config, as_mask, mode='r'):
    """A NumPy array, (H, W) or (H, W, C), still on disk unless mode=None; pickled objects are refused."""
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except ValueError as error:
        raise ValueError('holds Python objects, which are not read; save its pixels as .npy' if 'Python objects' in
                         str(error) else 'is no array that np.save has written, or it is cut off') from None
    if array.ndim not in (2, 3):
        raise ValueError(f'has the shape {array.shape}; expected height x width (x channels)')
    if array.ndim == 3 and array.shape[0] == config['in_channels'] != array.shape[2] and not as_mask:
        array = np.moveaxis(array, 0, -1)                              # (C, H, W) was saved
    check_pixels(path, array.shape, config)
    return array


def read_npy(*how):
    """A NumPy array, read: one that is still on disk ends the program (SIGBUS) where its file is cut meanwhile."""
    open_npy(*how)                                                     # its size first
    return open_npy(*how, mode=None)


def check_compressed(path, most):
    """DataError for a MATLAB file whose compressed elements unpack to more than `most` bytes, never held at once.
    The file: 128 bytes of header, then elements of type (15: zlib), size, content (MAT-File Format, level 5)."""
    total = 0
    with open(path, 'rb') as file:
        order = '<II' if file.read(128)[126:] == b'IM' else '>II'      # as scipy has it
        while len(tag := file.read(8)) == 8 and any(tag):              # zeros: MATLAB 7.3, or no element
            kind, size = struct.unpack(order, tag)
            stream, rest = zlib.decompressobj(), file.read(size * (kind == 15))
            file.seek(size * (kind != 15), os.SEEK_CUR)
            while rest and not stream.eof:
                total += len(stream.decompress(rest, min(most + 1, 2**26)))    # what is left is copied each time
                rest = stream.unconsumed_tail
                if total > most:
                    raise DataError(f'{path}: unpacks to more than {most} bytes; '
                                    'if it is no bomb, raise max_image_pixels')


def read_mat(path, config, as_mask):
    """The only matrix of a MATLAB file, or of a mask the only one that is named like one."""
    import scipy.io                                                    # only .mat needs it
    check_compressed(path, 8 * config['max_image_pixels'])             # doubles
    try:
        content = scipy.io.loadmat(path, simplify_cells=True)
    except scipy.io.matlab.MatReadError as error:
        raise ValueError(str(error)) from None
    except NotImplementedError:
        raise ValueError('is of MATLAB 7.3; save it with -v7, or as .npy') from None
    arrays = list(matrices(content))
    if len(arrays) > 1 and as_mask:                                    # groundTruth.Segmentation beside .Boundaries
        arrays = [(name, array) for name, array in arrays if set(folder_words(name)) & MASK_WORDS] or arrays
    if len(arrays) != 1:
        names = ', '.join([*dict.fromkeys(name for name, _ in arrays)][:6])
        raise ValueError(f'holds {len(arrays)} matrices; expected one'
                         + (f': {names}; save the wanted one as .npy' if arrays else ''))
    check_pixels(path, arrays[0][1].shape[:3], config)
    return arrays[0][1]


def matrices(value, name=''):
    """Every numeric matrix in what scipy reads of a MATLAB file, structs and cells included: (name, array)."""
    is_array = isinstance(value, np.ndarray)
    if is_array and value.ndim >= 2 and value.dtype.kind in 'biuf' and min(value.shape[:2]) > 1:
        yield name, value
    elif isinstance(value, dict):
        for field, part in value.items():
            yield from matrices(part, field)
    elif isinstance(value, list) or is_array and value.dtype == object:
        for part in value:
            yield from matrices(part, name)


READERS = {'.tif': read_tiff, '.tiff': read_tiff, '.npy': read_npy, '.mat': read_mat}          # all others: Pillow


def read_array(path, config, as_mask=False):
    """Any supported file -> (H, W) or (H, W, C). Raises DataError naming the file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError('is no file')                             # a pipe would be waited for
        array = READERS.get(os.path.splitext(path)[1].lower(), read_pillow)(path, config, as_mask)
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[..., 0]
        if as_mask and array.ndim == 3 and len(array) == 1 and array.shape[2] > 4:     # (1, H, W) was saved
            array = array[0]
        if array.dtype.kind not in 'biuf':
            raise ValueError(f'holds {array.dtype}; expected numbers')
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise ValueError(f'has the shape {array.shape}; expected height x width (x channels)')
        return array
    except UNREADABLE as error:
        advice = '; pip install imagecodecs' if re.search("'(imagecodecs|compression)'", str(error)) else ''
        is_gone, told = isinstance(error, FileNotFoundError), in_words(error).replace(str(path), 'it') + advice
        raise DataError(f'{path}: cannot be read: {"there is no such file" if is_gone else told}') from None


def read_image(path, config):
    """An image file -> (H, W, in_channels): uint8 stays (0..1 where image_dtype is float32), uint16 is divided by
    65535, all else float32 as is. Raises DataError naming the file if it cannot be decoded, holds NaN, is too deep for
    image_dtype=uint8, or has another number of channels."""
    return convert_pixels(read_array(path, config), path, config)


def convert_pixels(array, path, config):
    """Pixels as stored, (H, W) or (H, W, C) -> the channels and the type that the network takes."""
    channels = config['in_channels']
    array = array.astype(array.dtype.newbyteorder('='), copy=False)
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if config['image_dtype'] == 'uint8' and array.dtype.kind == 'i' and not (array >> 8).any():
        array = array.astype(np.uint8)                                 # 0 to 255 in a wider type
    array = array[..., None] if array.ndim == 2 else array
    found = array.shape[2]
    may_be_alpha = found == channels + 1 and channels in (1, 3) and array.dtype == np.uint8     # deeper: infrared?
    if may_be_alpha and str(path).lower().endswith(('.npy', '.mat')):
        may_be_alpha = not np.ptp(array[..., -1])                      # opaque
    if found == 1 < channels <= 4:
        array = np.repeat(array, channels, axis=2)
    elif may_be_alpha:
        array = array[..., :channels]
    elif (found, channels) == (3, 1):
        grey = array @ np.array([[0.299], [0.587], [0.114]])           # ITU-R 601, as Pillow does
        array = (grey.round() if array.dtype.kind in 'iu' else grey).astype(array.dtype)
    elif found != channels:
        advice = f'; type in_channels={found}' if config['mean'] == 'auto' else \
            '; arrays are height x width x channels, tensors channels first' * (channels in array.shape[:2]) or \
            '; of a stack each page wants a file of its own' * str(path).lower().endswith(('.tif', '.tiff'))   # trained
        raise DataError(f'{path}: has {found} channels, in_channels={channels}{advice}')
    if array.dtype == np.uint8:                                        # float32: beside deeper images, scaled alike
        return array.astype(np.float32) / 255 if config['image_dtype'] == 'float32' else array
    if config['image_dtype'] == 'uint8':                               # to a network of 0..255, 0..1 is black
        raise DataError(f'{path}: holds 16-bit or float pixels, but image_dtype=uint8; a network trained on 8-bit '
                        'images needs 8-bit images; one still to be trained image_dtype=auto')
    array = array / np.float32(65535) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)
    if not max(array.max(), -array.min()) < 1e30:                      # GDAL's usual no-data is -3.4e38
        raise DataError(f'{path}: holds pixels that are not finite or beyond 1e30 (NaN, -3.4e38 for no data)')
    return array


class TiffRows:
    """A large TIFF read by rows: image[a:b] decodes only the strips or tiles that hold these rows, and keeps no others.
    The constructor raises DataError or ValueError for a size, layout or compression that must be read as a whole."""

    def __init__(self, path, config):
        self.path, self.config = path, config
        self.page = page = open_tiff(path).pages[0]
        weakref.finalize(self, page.parent.close)
        self.shape = page.imagelength, page.imagewidth, page.samplesperpixel
        check_pixels(path, self.shape, config)
        check_pixels(path, page.chunks[:2], config)
        self.dtype = convert_pixels(np.zeros((1, 1, self.shape[2]), page.dtype), path, config).dtype
        plain = page.photometric in (1, 2) and (page.planarconfig == 1 or page.samplesperpixel == 1)
        others = [other for other in page.parent.pages[1:] if not other.subfiletype & 5]   # 1: a smaller copy, 4: mask
        is_small = self.shape[0] * self.shape[1] <= WINDOWED_ABOVE
        if is_small or not plain or page.imagedepth > 1 or others or page.tags.valueof(274, 1) != 1:
            raise ValueError('to be read as a whole')
        self.step = page.tilelength if page.is_tiled else page.rowsperstrip
        self.flat = tifffile.memmap(path, mode='r').reshape(self.shape) if page.is_memmappable else None
        self.kept = {} if page.is_memmappable else {0: self.decode(0)}     # {row of tiles: pixels}; can it be decoded?

    def __getitem__(self, rows):
        if self.flat is not None:                                      # uncompressed; all may be in a single strip
            return self.converted(np.array(self.flat[rows]))
        first, last = rows.start // self.step, (min(rows.stop, self.shape[0]) - 1) // self.step
        try:
            self.kept = {n: self.kept[n] if n in self.kept else self.decode(n) for n in range(first, last + 1)}
        except UNREADABLE as error:
            raise DataError(f'{self.path}: cannot be read: {in_words(error)}') from None
        begin = first * self.step
        block = np.concatenate(list(self.kept.values()))[rows.start - begin:rows.stop - begin]
        return self.converted(block)

    def converted(self, pixels):
        """Pixels as stored -> as the network takes them."""
        refuse_no_data(pixels, self.path, self.page)
        return convert_pixels(pixels, self.path, self.config)

    def decode(self, number):
        """One row of tiles, or one strip -> (rows, W, samples)."""
        page, across = self.page, -(-self.shape[1] // self.page.tilewidth) if self.page.is_tiled else 1
        rows = min(self.step, self.shape[0] - number * self.step)
        block = np.full((rows, *self.shape[1:]), page.nodata, page.dtype)
        for index in range(number * across, (number + 1) * across):
            segment, position, _ = page.decode(read_segment(self.path, page, index) or None, index)
            if segment is not None:                                    # a sparse tile is not stored
                part = block[:, position[-2]:]
                part[:, :segment.shape[-2]] = segment[0, :rows, :part.shape[1]]
        return block


def some_rows(image, most=64):
    """Up to `most` rows from all over an image (H, W, C) or TiffRows -> (rows, W, C)."""
    rows = np.linspace(0, image.shape[0] - 1, min(most, image.shape[0])).astype(int)
    return np.concatenate([image[row:row + 1] for row in rows.tolist()])


def refuse_other_scale(image, name, config):
    """DataError for a float32 image, (H, W, C) or TiffRows, most of which is 100 standard deviations from the mean."""
    if config['image_dtype'] == 'float32' and 'auto' not in (config['mean'], config['std']):
        most = 8 if isinstance(image, TiffRows) else 256               # of a file each may take a whole row of tiles
        some = some_rows(image, most)[:, ::max(1, image.shape[1] // 256)]
        if np.median(np.abs(some - np.float32(config['mean']))) > 100 * max(config['std']):
            raise DataError(f'{name}: values around {np.median(some):g} are far from the mean of the training '
                            'images; 16-bit pixels are scaled if they are stored as uint16, else divide them by 65535')


def open_image(path, config):
    """An image file -> (H, W, C): an array, or for a large TIFF the TiffRows that give it by rows."""
    image = None
    if os.path.splitext(path)[1].lower() in ('.tif', '.tiff') and os.path.isfile(path):
        with contextlib.suppress(DataError, *UNREADABLE):
            image = TiffRows(path, config)
    image = read_image(path, config) if image is None else image
    refuse_other_scale(image, path, config)
    return image


def read_mask(path, config):
    """A mask file -> (H, W) int32 codes: values as stored, or COLOUR + 0xRRGGBB. The files of a folder become 0 and 1;
    UNITED files give what is not 0 or black in any, the first one winning. DataError if those show the same place."""
    if UNITED in str(path):
        is_noisy = path.lower().endswith(JPEG_SUFFIXES)                # its black
        parts = (part * (part > 32) if is_noisy else part
                 for part in (read_mask(name, config) for name in path.split(UNITED)))
        whole = next(parts)
        for part in parts:                                             # one after the other: there may be hundreds
            if part.shape != whole.shape:
                raise DataError(f'{path}: these masks of one image have different sizes')
            shown, new = ~np.isin(whole, (0, COLOUR)), ~np.isin(part, (0, COLOUR))
            if 2 * np.count_nonzero(shown & new) > min(np.count_nonzero(shown), np.count_nonzero(new)):
                raise DataError(f'{path}: these masks of one image show the same place, so they are not united; name '
                                'those of one kind by masks= or mask_pattern')
            whole[new & ~shown] = part[new & ~shown]
        return whole
    if os.path.isdir(path):
        wanted = stem_in(config['mask_pattern'] or '{stem}')
        files = [Found(os.path.join(path, name), os.path.splitext(name)[0]) for name in sorted(os.listdir(path))
                 if wanted(name) is not None and may_be_read(name)]
        files = best_of_twins(without_results((), files, defaultdict(list)), JPEG_SUFFIXES, 0.5, defaultdict(list))
        whole, sizes = False, set()
        for file in files:                                             # one after the other: there may be thousands
            part, level = read_mask(file.path, config), 127 * file.path.lower().endswith(JPEG_SUFFIXES)    # noisy black
            if not level and 1 < part.max() < 33 and len(np.unique(part)) > 2:         # soft edges end in white
                raise DataError(f'{path}: {os.path.basename(file.path)} holds several numbers, as of classes, so it is '
                                'not united; name the masks of one kind by mask_pattern')
            sizes.add(part.shape)
            whole = whole | (Coding(None, level).encode(part) == 1) if len(sizes) == 1 else whole
        if len(sizes) != 1:
            raise DataError(f'{path}: ' + ('its masks have different sizes' if sizes else 'holds no mask'))
        return whole.astype(np.int32)
    array = read_array(path, config, as_mask=True)
    if array.dtype == bool:                                            # True is 255, as in 8-bit masks beside it
        array = array * np.uint8(255)
    if array.dtype.kind == 'f' and not (np.isfinite(array).all() and np.array_equal(array, np.round(array))):
        raise DataError(f'{path}: holds fractions, NaN or infinity; a mask holds whole numbers or colours; of '
                        'probabilities save mask > 0.5')
    if array.ndim == 3:
        if array.shape[2] not in (3, 4) or array.shape[2] == 4 and np.ptp(array[..., 3]):      # it varies: no alpha
            axis = np.argmin(array.shape)
            joined = f'class save mask.argmax({axis})' if array.any(axis).all() else f'object save mask.any({axis})'
            raise DataError(f'{path}: a mask of the shape {array.shape}; expected one channel (values) or 3 (colours); '
                            f'of one plane per {joined}, of a stack of pages each wants a file of its own')
        if array.dtype == np.uint16 and not (array % 257).any():       # 8 bits, widened, as in LabelMeFacade
            array = array // 257
        if not 0 <= array.min() <= array.max() <= 255:
            raise DataError(f'{path}: holds colours beyond 8 bits; save it with 8, or the channel that holds the '
                            'classes as a mask of its own')
        r, g, b = (array[..., i].astype(np.int32) for i in range(3))
        return COLOUR + (r << 16 | g << 8 | b)
    if array.dtype in (np.float32, np.float64, np.int32):              # GeoTIFFs mark no data by -3.4e38, -2147483648
        array = np.where(array <= (-2 ** 31 if array.dtype == np.int32 else -3.4e38), -1, array)
    worst = max(array.max().item(), array.min().item(), key=abs)
    if abs(worst) >= COLOUR and not names_colours(config):             # names_colours: a palette gives colour codes
        raise DataError(f'{path}: holds the number {worst}; those of a mask must be below {COLOUR}')
    return array.astype(np.int32)


# ===== data: what the masks mean ======================================================


@dataclasses.dataclass
class Coding:
    """How stored mask codes become class ids: a table, or a threshold above which a pixel is foreground."""
    table: dict                    # code -> class id (255: ignored); None with a threshold
    threshold: int = None
    num_classes: int = 2
    words: str = ''                # the same, for the user
    below: bool = False            # the foreground is what is not above the threshold
    ignored: int = -1              # with a threshold: the code that is ignored, as all codes below 0 are

    def encode(self, codes, path=''):
        """(H, W) codes -> (H, W) uint8 class ids, 255 ignored. DataError on a code that has no meaning."""
        if self.threshold is not None:
            left_out = codes < 0
            if self.ignored >= 0:
                left_out |= (codes == self.ignored) | (codes == COLOUR + self.ignored * 0x010101)
            if codes.max() >= COLOUR:                                  # takes seven times the memory of the codes
                light = np.min if self.below and self.threshold == 254 else np.max     # <255 is all but white
                codes = np.where(codes >= COLOUR, light([codes >> at & 0xff for at in (16, 8, 0)], 0), codes)
            return np.where(left_out, IGNORE, (codes > self.threshold) != self.below).astype(np.uint8)
        ids = looked_up(tuple(self.table.items()))[codes]
        if not ids.all():
            value = name_code(int(codes[ids == 0][0]))
            raise DataError(f'{path}: holds the value {value}, which has no meaning in mask_values')
        return (ids - 1).astype(np.uint8)


@functools.lru_cache(4)
def looked_up(table):
    """((code, class id), ...) -> an array with class id + 1 at the index of each code, and 0 for codes without a class.
    Negative codes index from the end. Nearly all of its 96 MiB is never touched, and so takes no memory."""
    places = np.zeros(3 * COLOUR, np.uint16)
    for code, class_id in table:
        if -COLOUR < code < 2 * COLOUR:                                # no mask holds others
            places[code] = class_id + 1
    return places


def name_code(code):
    """A code as the user types it: 7 or '#ff0000'."""
    return repr(f'#{code - COLOUR:06x}') if code >= COLOUR else str(code)


def share_of(codes, values):
    """The share of the pixels that hold one of these codes. values: {code: pixels}."""
    return sum(values.get(code, 0) for code in codes) / sum(values.values())


def as_grey(code, most=0):
    """The grey value of a colour such as #0a0a0a, whose channels differ by at most `most`; any other code as it is."""
    channels = [code >> at & 0xff for at in (16, 8, 0)]
    return max(channels) if code >= COLOUR and max(channels) - min(channels) <= most else code


def say_ignored(ignored):
    """'; 254, 255 is ignored', for these codes; '' for none."""
    return f'; {", ".join(map(name_code, sorted(ignored)[:12]))} is ignored' if ignored else ''


def find_coding(values, areas, palette, config, counts_up, lossy):
    """{code: (pixels, images)} of all masks -> Coding. DataError, with lines to type, where the meaning is unclear.
    areas: {code: pixels in_areas}; `palette`: palettes hold them all; `counts_up`: they look like ids of objects (see
    count_up); `lossy`: all are JPEG."""
    wish, ignore = parse_mask_values(config['mask_values']), config['ignore_index']
    counts, images = ({code: seen[column] for code, seen in values.items()} for column in (0, 1))
    grey_only, special = max(values) < COLOUR, {code for code in values if code == ignore or code < 0}
    if isinstance(wish, int):                                          # is 255 white (foreground) or void?
        others = max((code for code in values if code != ignore), default=0)
        is_parted = wish and abs(wish) + (wish > 0) <= others < 33         # numbers, beside which 255 is void
        is_white = ignore == 255 and not is_parted and (wish or max(values) > 255 or 254 in values or len(values) < 3)
        left_out = [code for code in special if code < 0 or not is_white]
        words = f'values {"below" if wish < 0 else "above"} {abs(wish)} are foreground{say_ignored(left_out)}'
        soft = {code for code in values if 0 < code < 255} - {*left_out}
        words += f'; {share_of(soft, counts):.2%} of the pixels lie between 0 and 255' * (wish > 0 and len(soft) > 2)
        coding = Coding(None, -wish - 1 if wish < 0 else wish, 2, words, wish < 0, max(left_out, default=-1))
    elif wish is None:
        coding = guess_coding(counts, images, areas, special, palette, config['num_classes'], counts_up, lossy)
    else:
        wish = {as_grey(code) if grey_only else code: class_id for code, class_id in wish.items()}
        is_meant = not grey_only and (max(wish) >= COLOUR or 0 not in wish.values())       # else numbers of classes are
        greys = {0, 255} & wish.keys() if is_meant else ()
        wish = {COLOUR + code * 0x010101: wish[code] for code in greys} | wish         # beside colours 0 is black
        if ignore != 255 and wish.get(ignore, IGNORE) != IGNORE:       # 255 is ignored unasked
            raise ConfigError(f'ignore_index={ignore}: mask_values makes {ignore} class {wish[ignore]}; leave one out')
        coding = coding_from_table(wish, counts, areas, special, lossy)
    if coding.table is not None and grey_only:                         # grey stored as RGB means the same
        coding.table |= {COLOUR + code * 0x010101: c for code, c in coding.table.items() if 0 <= code < 256}
    elif coding.table is not None:                                     # and grey beside colours, see in_grey
        coding.table = {as_grey(code): c for code, c in coding.table.items()} | coding.table
    wanted = config['num_classes']
    if wanted != 'auto':
        if coding.num_classes > wanted:
            raise DataError(f'the masks hold class {coding.num_classes - 1}, but num_classes={wanted}: type '
                            f'num_classes={coding.num_classes} or say in mask_values what the values mean')
        coding.num_classes = wanted
    return coding


def coding_from_table(wish, values, areas, special, lossy):
    """The user's mask_values -> Coding. Other values are noise around these, else background; errors if 0 is named."""
    names = lambda codes, most=12: ', '.join(name_code(code) for code in sorted(codes)[:most])
    if wish in ({255: 1}, {0: 0, 255: 1}) and is_noisy(values, areas):
        return Coding(None, 127, 2, 'as mask_values says; with noise between 0 and 255, above 127 is foreground')
    named, all_named = dict.fromkeys(special, IGNORE) | wish, 0 in wish.values()
    colours, greys = [code for code in values if code >= COLOUR], [code for code in values if 0 <= code < 256]
    near = {}
    if has_soft_edges(colours, areas):                                 # if class 0 is named, all else is noise
        near = nearest(colours, [code for code in wish if code >= COLOUR], 255 if all_named else 48)
        forgotten = {*peaks(areas, colours, 48)} - wish.keys() if len(colours) <= MOST_CLASSES else ()
        near = {code: name for code, name in near.items() if code not in forgotten}
    elif all_named and (lossy or has_soft_edges(greys, areas) and wish.keys() <= {*peaks(values, greys, 16),
                                                                                   *peaks(areas, greys, 16)}):
        is_noise = {*range(240, 255)} & wish.keys() and 255 not in {*peaks(values, greys, 16), *peaks(areas, greys, 16)}
        if is_noise and 255 in special - wish.keys():                  # of a class of 254, say
            named, special = {code: named[code] for code in named if code != 255}, special - {255}
        near = nearest(greys, [code for code in named if 0 <= code < 256], 255)
    far = near.keys() - nearest([*near], [*{*near.values()}], 64).keys() if len(colours) > MOST_CLASSES else ()
    if share_of(far, values) > 1 / 3:
        raise DataError(f'more than a third of the pixels are far from all that mask_values names ({names(wish)}): '
                        'these are pictures, not masks')
    if not wish.keys() & {*values, *near.values()} and values.keys() - {0}:
        raise DataError(f'mask_values names {names(wish)}, none of which occurs; the masks hold {names(values, 24)}')
    table = {code: named[name] for code, name in near.items()} | named
    unnamed = values.keys() - table.keys()
    if unnamed and all_named:
        are_ids = unnamed <= {*wish.values()} and not (wish.keys() & values.keys()) - {0}      # of the same classes
        line = suggest(wish | {code: code if are_ids else IGNORE for code in sorted(unnamed)[:MOST_CLASSES]})
        raise DataError(f'mask_values does not name {names(unnamed)}; ' +
                        ('if they are ids of objects type mask_values=nonzero' if len(unnamed) > MOST_CLASSES else
                         f'add them, for instance as {"classes" if are_ids else "ignored"}: mask_values={line}'))
    table |= dict.fromkeys(unnamed, 0)
    highest = max([class_id for class_id in wish.values() if class_id != IGNORE], default=1)
    words = f'as mask_values says; {names(unnamed, 8)} -> 0' if unnamed else 'as mask_values says'
    share = share_of(near.keys() - named.keys(), values)
    words += f'; {share:.2%} of the pixels are noise around these' if share else ''
    return Coding(table, None, max(2, highest + 1), words + say_ignored(special - wish.keys()))


def channels(codes):
    """Codes (N,) -> (N, 3) red, green and blue; 0, 0 and the value of greys."""
    return (np.array(codes, np.int32)[:, None] >> np.array([16, 8, 0]) & 255).astype(np.int16)


def nearest(codes, named, most):
    """{code: the nearest of the named ones}, for colours or greys with no channel further away than `most`."""
    if not named or not codes:
        return {}
    steps = np.abs(channels(codes)[:, None] - channels(named)).max(2)  # (codes, named)
    return {codes[row]: named[steps[row].argmin()] for row in np.flatnonzero(steps.min(1) <= most).tolist()}


def peaks(values, codes, reach):
    """Those of the codes (all greys, or all colours) that stand out of noise (JPEG, soft edges) as classes do: more
    than 1 in 10000 pixels (1 in 1000 of very many codes), the most frequent within `reach` in each channel, and five
    times as frequent as the mean code there. Half the reach will do for a hundredth of the pixels. values: {code:
    pixels}."""
    pixels, places = np.array([values[code] for code in codes], np.int64), channels(codes)
    whole = pixels.sum()
    least = whole / (10000 if len(codes) < 2**14 else 1000)            # to look at each of many takes long

    def stands_out(row, reach):
        around = pixels[(np.abs(places - places[row]) <= reach).all(1)]
        noise = (around.sum() - pixels[row]) / max(1, len(around) - 1)
        return pixels[row] == around.max() and pixels[row] >= 5 * noise

    found = []
    for row in np.flatnonzero(pixels > least):
        is_tie = any((np.abs(places[row] - places[other]) <= reach // 2).all() for other in found)
        if not is_tie and (stands_out(row, reach) or pixels[row] > whole / 100 and stands_out(row, reach // 2)):
            found.append(row)
    return [codes[row] for row in found]


def has_soft_edges(codes, areas):
    """Whether there is noise around the classes: more codes than those have, or most fill no area. areas: {code: pixels
    in_areas}."""
    return len(codes) > MOST_CLASSES or len(codes) > 16 and not np.median([areas[code] for code in codes])


def suggest(table):
    """A mask_values dict as the user types it."""
    return '"{' + ', '.join(f'{name_code(k)}: {v}' for k, v in table.items()) + '}"'


def has_grey_class(areas):
    """Whether a grey between dark and bright fills areas, as a class does, but no soft edge and hardly any noise."""
    return any(33 <= code < 223 for code in peaks(areas, [code for code in areas if 0 <= code < 256], 16))


def is_noisy(values, areas, lossy=False):
    """Whether {grey: pixels} look like 0 and 255 with JPEG noise or soft edges in between."""
    if 0 not in values or max(values) != 255 or len(values) <= (2 if lossy else 16):
        return False
    dark, between, bright = (share_of(range(*ends), values) for ends in ((0, 33), (33, 223), (223, 256)))
    peak = max(share_of(range(low, low + 16), values) for low in range(64, 176, 16))       # high: a class
    has_noise = any(code in values for code in range(223, 255))
    return dark + bright > 0.9 and has_noise and between / 2 < bright and peak < max(between / 2, 1e-4) \
        and not has_grey_class(areas)


def guess_coding(values, images, areas, special, palette, wanted, counts_up, lossy):
    """The Coding, if it is beyond doubt: 0/1, 0/255, class indices, noisy 0/255; else a DataError that explains the
    values. special: those of them that are ignored; wanted: num_classes, perhaps 'auto'."""
    plain, ignored = sorted(values.keys() - special), dict.fromkeys(special, IGNORE)
    between, void = (share_of(codes, values) for codes in (range(1, 255), [255]))
    below, tops = {code for code in values if code < 0}, {code for code in values if code > 0}
    is_white = tops <= {255, 65535} and (not below or tops and 0 in values) and special - below <= {255}
    if is_white and (wanted in ('auto', 2) or 65535 in values):
        return Coding({0: 0} | ignored | dict.fromkeys(tops or [255], 1), None, 2, '0 is background, ' + (
            f'{" and ".join(map(str, sorted(tops)))} foreground' if tops else 'and there is nothing else')
            + say_ignored(below))
    is_rare_void = 255 not in special or share_of([1], values) > void / 10
    if set(plain) <= {0, 1} and not (special and plain == [1]) and (wanted == 2 or wanted == 'auto' and is_rare_void):
        doubt = '' if is_rare_void else '; if 255 is the foreground type mask_values="{255: 1}"'
        return Coding({0: 0, 1: 1} | ignored, None, 2, f'0 is background, 1 foreground{say_ignored(special)}{doubt}')
    highest = max(plain, default=0)
    dense = len(plain) >= (0.8 if highest > 4 else 1) * (highest + 1) and between > void / 10
    if wanted == 'auto':
        fits = plain[:1] == [0] and highest < MOST_CLASSES and (palette or dense) and not counts_up and not lossy
    else:                                                              # a given num_classes means class indices
        fits = plain and 0 <= plain[0] and highest < wanted
    if fits:
        table = {code: code for code in range(highest + 1 if wanted == 'auto' else wanted)} | ignored
        return Coding(table, None, highest + 1, f'class indices 0 to {highest}{say_ignored(special)}')
    if plain[:1] == [0] and is_noisy(values, areas, lossy):
        return Coding(None, 127, 2, f'0 and 255 with {between:.2%} of the pixels in between '
                                    '(JPEG noise or soft edges): above 127 is foreground')
    noise = ['the masks are JPEG, whose noise makes values of its own: masks want PNG'] if lossy else []
    lines = explain_values(values, images, areas, plain, special, counts_up, lossy)
    if wanted != 'auto' and len(plain) == highest + 1:                 # 0 to 3 of num_classes=3
        lines[1:] = sorted(lines[1:], key=lambda line: 'type num_classes=' not in line)
    raise DataError(noise + lines, 'the mask values are not clear')


def has_more_classes(line, config):
    """Whether a line has a mask_values for more classes than num_classes, if that is a number."""
    numbers = re.findall(r': (\d+)[,}]', line.partition('"{')[2])
    return config['num_classes'] != 'auto' and any(config['num_classes'] <= int(n) < IGNORE for n in numbers)


def numbered(codes):
    """A table that makes each of the codes a class, in their order; white is the first where there is no black."""
    planes = [COLOUR + 0x010000, COLOUR + 0x000100, COLOUR + 0x000001]
    if {*codes} == {*planes}:                                          # one per class, in their order
        return dict(zip(planes, range(3)))
    white = COLOUR + 0xffffff if COLOUR not in codes else None         # what is painted on is the background
    return {code: number for number, code in enumerate(sorted(codes, key=lambda code: (code != white, code)))}


def explain_values(values, images, areas, plain, special, counts_up, lossy):
    """Lines for the user: what was found, then what to type for each possible meaning, the likeliest first. values,
    images: {code: how many pixels, images}; plain, special: the codes that are not ignored, and those that are."""
    if not plain:
        return [f'they hold nothing but {", ".join(map(name_code, sorted(special)))}, which usually mark what is to be '
                'ignored' + f'; if they are classes type mask_values={suggest(numbered(special))}' * (len(special) > 1)]
    colours, many = plain[-1] >= COLOUR, len(plain) > MOST_CLASSES
    what = 'colours' if colours else 'values'
    lines = [list_values(values, images, plain, special)] + many * [
        'so many look like ids of objects (instance masks), like noise, such as that of JPEG, or like photographs']
    noisy = has_soft_edges(plain, areas) or lossy and not colours
    usual, main, has_main = max(plain, key=values.get), [], False
    if noisy:
        codes = [code for code in values if (code >= COLOUR if colours else 0 <= code < 256)]
        reach, seen = 48 if colours else 16, values if colours and lossy else areas    # JPEG makes areas of noise, too
        main = [code for code in peaks(seen, codes, reach) if any(map(areas.get, nearest(codes, [code], reach // 4)))]
        near = nearest(codes, main, reach)
        shown = [code for code in codes if near.get(code) != usual]    # all but the background
        is_near = min(share_of(near, values), share_of(near.keys() & shown, values) / (share_of(shown, values) or 1))
        if 1 < len(main) <= MOST_CLASSES and is_near > 1 / 2:          # else these are photographs
            lines.append(f'if these {what} are the classes and others are noise around them '
                         f'type mask_values={suggest(numbered(main))}')
            has_main = True
    elif colours or len(values) > 2 or special:
        lines += read_as_classes(values, images, plain, special, what)
    filled = [code for code in plain if areas[code] and code not in (0, COLOUR)]
    are_ids = counts_up or falls([images[code] for code in plain if code not in (0, COLOUR)]) \
        or plain[:1] in ([0], [COLOUR]) and not has_main and len(filled) > MOST_CLASSES \
        and 2 * sum(images[code] == 1 for code in filled) > len(filled)
    if lossy and plain[:1] in ([0], [COLOUR]) and (level := emptiest_level(values, main)):
        lines.append(f'if all but black is foreground, as in pictures cut out on black, type mask_values=">{level}"')
    elif many and not lossy and (usual == COLOUR + 0xffffff or 0 < usual == plain[0] < COLOUR):
        ground = 'white is foreground, as in pictures cut out on white,' if colours else f'{usual} is foreground'
        lines.append(f'if all but {ground} type mask_values="{"<255" if colours else f">{usual}"}"')
    elif (not lossy or max(values) <= 127) and plain[:1] in ([0], [COLOUR]):
        is_void = counts_up and plain[-1] < 254                        # 255 is no object's id, but lies around them
        also_255 = ' ignore_index=None' if 255 in special and len(values) > 2 and not is_void else ''
        cut_out = ', or pictures cut out on black' * (colours and many)
        lines.insert(1 if are_ids else len(lines), f'if they are ids of objects{cut_out}, so that all but 0 (black) is '
                                                   f'foreground, type mask_values=nonzero{also_255}')
    if not colours and not lossy and len(plain) > 2 and 0 <= plain[0] and plain[-1] < 255:
        are_classes = many and (has_main or plain == [*range(len(plain))]) and plain[-1] < 254 and not are_ids
        are_classes &= np.median([areas[code] for code in plain]) > 0  # else most are of soft edges
        lines.insert(2 if are_classes else len(lines), 'if they are class numbers, of which some may not occur, '
                                                       f'type num_classes={plain[-1] + 1} or more')
    if not many and len(plain) > 2 and usual not in (0, COLOUR) and share_of([usual], values) > 1 / 2:
        table = {code: int(code != usual) for code in plain} | dict.fromkeys(special, IGNORE)
        lines.append(f'if all but {name_code(usual)} is foreground type mask_values={suggest(table)}')
    is_clear = noisy or share_of(range(112, 144), values) < 0.05       # else >127 may split a class of 127 and 128
    if colours and (many or lossy) or not colours and plain[0] <= 127 < max(values) <= 255 and is_clear:
        lines.insert(1 if leans_on_white(values, images, areas, plain) else len(lines),
                     'if bright is foreground type mask_values=">127"')
        if (bright := share_of(range(128, 256), values)) > 1 / 2:      # ink on paper, if nearly all is
            is_ink = bright > 0.9 and any(33 <= code < 223 for code in plain) and not has_grey_class(areas)
            lines.insert(1 if is_ink else len(lines), 'if dark is foreground type mask_values="<128"')
    if not noisy and not (special and len(plain) == 1):                # with one value left, nothing is background
        meant = {*plain} - {COLOUR, *slips_of(values)}                 # red on a white page
        last = 255 if 255 in values else min(meant, key=values.get) if colours else plain[-1]
        lines.append(f'if only {name_code(last)} is foreground type mask_values={suggest({last: 1})}')
    return lines


def emptiest_level(values, main=()):
    """The level of brightness around which the fewest pixels lie, between black with its noise of JPEG and where most
    light is, up to 127 and below the darkest of the `main` codes above 32. 0 if >127 says nearly the same, as of black
    and white. values: {code: pixels}."""
    brightest = channels([*values]).max(1)                             # of red, green and blue
    pixels, levels = np.bincount(brightest, [*values.values()], 256), np.arange(256)
    darkest = min((level for level in channels([*main]).max(1).tolist() if level > 32), default=255)
    most = min(127, int(levels ** 2 @ pixels / max(1, levels @ pixels)), darkest - 8)
    level = int(np.convolve(pixels, np.ones(9), 'same')[:most + 1].argmin())
    return level if pixels[level + 1:128].sum() > pixels[level + 1:].sum() / 20 else 0


def leans_on_white(values, images, areas, plain):
    """Whether "bright is foreground" should come first; arguments as in explain_values. 255 that marks what lies around
    objects is in no mask without another value."""
    white, others = share_of([255], values), [code for code in plain if 0 < code < 255]
    between, bright = (share_of(range(*ends), values) for ends in ((33, 223), (223, 256)))
    has_noise = len(plain) > MOST_CLASSES and plain[-1] > 222 and bright > between > 0
    is_map = max(values) == 255 and is_scale(values) and 16 < len(plain) <= MOST_CLASSES       # saliency
    is_alone = share_of(others, values) < white < 1 / 10 and sum(map(images.get, others)) < images[255]    # cracks
    are_votes = len(values) > 4 and is_scale(values) and share_of(others, values) < min(white, 1 / 10)     # CUB-200
    has_specks = share_of([0, 255], values) > 0.999 and plain[1:2] > [15] or plain[0] == 0 and plain[1:2] > [247]
    return (has_noise or is_map or is_alone or are_votes or has_specks) and not has_grey_class(areas)


def list_values(values, images, plain, special):
    """The values with their shares and images: the 24 most frequent ones, and those that may be ignored."""
    often = sorted(sorted(plain, key=lambda code: -values[code])[:24])
    listed = [*often, *sorted(special)[-24:]]
    found = ', '.join(f'{name_code(code)} ({share_of([code], values):.2%}, {images[code]} images)' for code in listed)
    more = f' and {len(values) - len(listed)} more' if len(values) > len(listed) else ''
    return f'{len(values)} values (share of pixels, images): {found}{more}'


def is_scale(values):
    """Whether the values are a scale of equal steps: 0, 128, 255."""
    return len(values) > 1 and np.ptp(np.diff(sorted(values))) <= 2


def slips_of(values):
    """{colour of less than a 1000th of the pixels: another, ten times as frequent and at most 2 away in each channel},
    as #0102ff is beside #0101ff. Not of dark ones: #070000 and #080000 are numbers of classes (CARLA)."""
    bright, least = [c for c in values if c >= COLOUR and channels([c]).max() > 127], sum(values.values()) / 1000
    return {code: other for code, other in itertools.permutations(bright, 2)
            if values[code] < min(least, values[other] / 10) and nearest([code], [other], 2)}


def read_as_classes(values, images, plain, special, what):
    """Lines that make each value a class, with or without ignoring specks and values that often mean ignored;
    these come first if they are rare."""
    slips = slips_of(values)
    often = sorted(slips, key=values.get, reverse=True)                # a slip of a slip comes after it

    def line_of(table):
        for code in often:
            table[code] = table[slips[code]]
        return f'type mask_values={suggest(table)}'

    values, plain = {code: values[code] for code in values.keys() - slips}, [*filter(lambda c: c not in slips, plain)]
    lines = [f'if these {what} are the classes {line_of(numbered(values))}']
    whole, count = sum(values.values()), max(images.values())          # a rare class still fills its own images
    specks = [code for code in plain if values[code] < whole * min(1 / 2000, images[code] / count / 250)
              and not is_scale(values)]
    rare = share_of(special, values) < 1 / 10                          # a void label covers no more
    rest = values.keys() - specks - (special if rare else set())
    if specks and len(rest) > 1:
        few = ', '.join(map(name_code, specks[:6]))
        table = numbered(rest) | dict.fromkeys(sorted(values.keys() - rest), IGNORE)
        lines.insert(len(specks) + len(slips) < len(rest), f'if {few}{", ..." * (len(specks) > 6)} are specks, to be '
                                                           f'ignored, {line_of(table)}')
    if special and len(plain) > 1:
        marks, table = ', '.join(map(name_code, sorted(special))), numbered(plain) | dict.fromkeys(special, IGNORE)
        lines.insert(0 if rare and not is_scale(values) else 1,
                     f'if {marks} marks what is to be ignored {line_of(table)}')
    return [*lines, '(255 after a colon means ignored; reorder as you like)']


def lines_of(path):
    """The lines in the first 16 KiB of a text file; [] if it is none."""
    if os.path.isfile(path):                                           # a pipe would be waited for
        with contextlib.suppress(OSError, ValueError), open(path, encoding='utf-8-sig') as file:
            return file.read(2**14).splitlines()
    return []


def read_class_list(path):
    """A text file with a line for each class -> {code: name}: by red, green and blue (CVAT's labelmap.txt,
    class_dict.csv), by a number (Roboflow's _classes.csv), by place (class_names.txt). {} for other files."""
    rows = []
    for line in lines_of(path):
        fields = re.split('[,;:\t]', line)
        fields = fields if len(fields) > 1 else re.split(r'\s+(?=\d)|(?<=\d)\s+', line)
        names = [name for field in fields if re.search(r'[^\W\d]', name := field.strip(' "\''))]
        if names and not re.match('#|__ignore__', line):
            numbers = ' '.join(field for field in fields if not re.search(r'[^\W\d]', field))
            rows.append((names[0], [*map(int, re.findall(r'\b\d{1,9}\b', numbers))][-3:]))
    most = max((len(numbers) for _, numbers in rows), default=0)
    is_header = re.compile('(class|label)?[ _]?(name|class|label)s?', re.IGNORECASE).fullmatch
    rows = [(name, numbers) for name, numbers in rows if len(numbers) == most and not is_header(name)]
    are_names = all(re.fullmatch(r'\w([\w +/&()-]|\.(?!\w)){,60}', name) for name, _ in rows)
    if not are_names or most == 2 or most == 3 and any(max(numbers) > 255 for _, numbers in rows):
        return {}
    if most == 3:
        listed = {COLOUR + int.from_bytes(numbers, 'big'): name for name, numbers in rows}
    elif most == 1:
        listed = dict(sorted((numbers[0], name) for name, numbers in rows))
    else:
        listed = dict(enumerate(name for name, _ in rows))
    return listed if len({*listed.values()}) == len(listed) == len(rows) else {}       # no name or code twice


def offer_names(paths, values, coding=None):
    """[what to type] if one of these text files lists all that the masks hold, else []. `coding`: how they are read."""
    known = coding.table if coding else dict.fromkeys({code for code in values if code < 0} | {IGNORE}, IGNORE)
    seen = {code for code in values if known.get(code) != IGNORE} if known else set()  # a threshold has no table
    grey_only, total = max(values) < COLOUR, sum(pixels for pixels, _ in values.values())
    is_rare = lambda code, times=10: times * values.get(code, (0, 0))[0] < total       # a void label covers no more
    doubts = []
    for alike in grouped(paths, os.path.basename).values():            # labelme writes label_names.txt per image
        is_for_each = len(alike) > max(2, max(images for _, images in values.values()) // 2)
        contents = {(*lines_of(path),): path for path in alike} if is_for_each else ()
        if len(contents) > 1 and re.search('(?i)name|class', os.path.basename(alike[0])):
            first, second, *_ = contents.values()
            return [f'{first} lists other classes than {second}: if each image numbers its own, no number means the '
                    'same in all masks; they are to be drawn anew, numbered alike']
    for path in paths:
        listed = {as_grey(code) if grey_only else code: name for code, name in read_class_list(path).items()}
        black = 0 if grey_only else COLOUR
        stray = {code for code in seen - listed.keys() - {black} if not grey_only and is_rare(code, 1000)}
        if seen - stray - listed.keys() == {black}:
            listed = {black: 'background'} | listed
        are_as_stored = coding and all(known.get(code) == code for code in seen)
        if are_as_stored and listed.keys() == {*range(len(listed))} and 1 < len(listed) < max(seen, default=0):
            doubts.append(f'{path} lists {len(listed)} classes, the masks hold numbers up to {max(seen)}: if they are '
                          'ids of objects type mask_values=nonzero')
        if not seen or not seen - stray <= listed.keys() or grey_only and 2 * max(seen) + 2 < len(listed):
            continue                                                   # it belongs to other masks, or to boxes
        ignored = {code for code, name in listed.items() if known.get(code) == IGNORE
                   or re.search(r'(?i)no[-_ ]?data|outside' + '|void|ignore|unlabel' * is_rare(code), name)}
        kept = [code for code in listed if code not in ignored]
        ground = next((code for code in kept if re.match(r'(?i)\W*_*(back|bg\b)', listed[code])), black)
        kept = sorted(kept, key=lambda code: len(kept) == 2 and code != ground)        # of two, wherever it is named
        if not 1 < len(kept) < IGNORE:
            continue
        table = dict.fromkeys(listed, IGNORE) | {code: number for number, code in enumerate(kept)}
        line = f'class_names="[{",".join(listed[code] for code in kept)}]"'
        table |= dict.fromkeys(sorted(stray), IGNORE) if len(values) <= MOST_CLASSES else {}      # else it is noise
        if not coding or any(known.get(code) != table.get(code) for code in seen):
            line = f'mask_values={suggest(table)} {line}'
        elif coding.num_classes != len(kept):
            line = f'num_classes={len(kept)} {line}'
        return [f'{path} lists the classes: type {line}']
    return doubts[:1]


# ===== data: looking at all of it once ================================================

TURNED = ' (turned upright, EXIF {})'
ONE_LARGE = threading.Lock()       # only one thread at a time decodes a large mask or image, for memory's sake


@dataclasses.dataclass
class Data:
    """A data set that has been looked at: the pairs, what the masks mean, and what was seen on the way."""
    pairs: Pairs
    coding: Coding
    values: dict                   # code -> (pixels, images), over all splits
    meaning: dict                  # code -> class id, 255 for ignored
    classes: dict                  # class id -> (pixels, images)
    shares: np.ndarray             # (num_classes,) share of the counted pixels of the training images
    rarity: np.ndarray             # (pairs,) of the rarest class in the mask, see rarities; 0 where it has none but 0
    sides: tuple                   # two classes, the first left of the second, see find_sides; () if there are none
    sizes: Counter                 # (height, width) -> images
    modes: Counter                 # 'RGB image, L mask' -> images
    marks: str                     # a hash of what the images that train and validate hold: see mark_of
    notes: list


def read_header(path, config):
    """(height, width, mode such as 'RGB' or 'uint16 x 4') of an image, without decoding pixels except in a .mat."""
    suffix = os.path.splitext(path)[1].lower()
    if not os.path.isfile(path):
        raise DataError(f'{path}: cannot be read: is no file')         # a pipe would be waited for
    if suffix in READERS.keys() - {'.tif', '.tiff'}:
        array = open_npy(path, config, False) if suffix == '.npy' else read_array(path, config)
        (height, width, channels), dtype = (*array.shape, 1)[:3], array.dtype
    elif suffix in ('.tif', '.tiff') and not pillow_sees_all(path, config):
        with open_series(path, config) as (series, (height, width), bands):
            channels, dtype = 1 if bands is None else series.shape[bands], series.dtype
    else:
        with open_pillow(path, config) as picture:
            turned = orientation(picture)
            is_as_told = turned < 5 or picture.format == 'TIFF'        # Pillow has the sides of a turned TIFF
            size = (picture.height, picture.width) if is_as_told else (picture.width, picture.height)
            return *size, pillow_mode(picture) + (TURNED.format(turned) if turned != 1 else '')
    if dtype.kind not in 'biuf' or not height or not width:
        raise ValueError(f'holds {height} x {width} {dtype}; expected numbers')
    return height, width, f'{dtype.name} x {channels}'


def scan_pair(image, mask, config):
    """Read the header of an image and all of its mask -> a record for JSON: 'size' (H, W); 'mode', and that of the
    mask, 'mask'; 'mark' (mark_of); 'codes' of the mask, how many 'pixels' hold each, and of these on the 'edge', in
    'areas' (in_areas) and 'inside' (beside their like alone); 'palette', colours of the codes that are indices (None:
    of one that is not). DataError if a file is unusable."""
    try:
        height, width, mode = read_header(image, config)
        with ONE_LARGE if height * width > 2**24 else contextlib.nullcontext():
            codes = read_mask(mask, config)
    except UNREADABLE as error:
        raise DataError(f'{image}: cannot be read: ' + in_words(error).replace(str(image), 'it')) from None
    if codes.min() >= 0 and codes.max() < 2**20:                       # np.unique sorts, which takes longer
        counts = np.bincount(codes.ravel())
        found = np.flatnonzero(counts)
        counts, tally = counts[found], lambda some: np.bincount(some, minlength=found[-1] + 1)[found]
    else:
        found, counts = np.unique(codes, return_counts=True)
        tally = lambda some: np.bincount(np.searchsorted(found, some), minlength=len(found))
    edge = np.concatenate([codes[0], codes[-1], codes[:, 0], codes[:, -1]])
    are_numbers = len(found) > 3 and 0 <= found[0] and found[-2] <= 32
    areas = counts
    if len(found) > 2 and found[-2] > 32 and not 255 < found[-1] < COLOUR:     # edges may be soft
        areas = tally(codes[in_areas(codes)])
    if len(found) > 2 and same_file(image, mask):                      # an image and its mask may both be black
        raise DataError(f'{mask}: is a copy of its image, no mask')
    if config['mask_values'] is None and len(found) > max(4096, codes.size // 16) \
            and np.sort(counts)[-32:].sum() < 0.15 * codes.size:       # 0.25 and more of colours saved as JPEG
        raise DataError(f'{mask}: looks like a photograph, of {len(found):,} different values: are images and masks '
                        'swapped? If not, say in mask_values what it holds')
    headers = [mask_header(part) for part in mask.split(UNITED)]
    mask_mode, _, turned = headers[0]
    colours = {code: colour for _, colours, _ in headers for code, colour in colours.items()}
    if turned != 1 and not mode.endswith(TURNED.format(turned)):
        raise DataError(f'{mask}: carries a rotation (EXIF orientation {turned}) that its image does not; save it '
                        'upright')
    sizes = f'{image}: is {width} x {height} pixels, its mask {mask} {codes.shape[1]} x {codes.shape[0]}'
    if re.search('EXIF [5-8]', mode) and codes.shape == (width, height) != (height, width):
        raise DataError(f'{sizes}: the image is turned upright, as its EXIF tag says, the mask is not; save the image '
                        'without that tag, or the mask upright')
    if codes.shape != (height, width) and not may_be_scaled(codes.shape, (height, width), config):
        if mode.endswith(f' x {codes.shape[1]}') and width == codes.shape[0]:
            raise DataError(f'{sizes}; if its bands come first type in_channels={height}')
        if mode.endswith(f' x {codes.shape[0]}') and height == codes.shape[1]:
            raise DataError(f'{sizes}; if its bands come last type in_channels={width}')
        problem = Line(f'{sizes}, of {"the same" if same_shape(codes.shape, (height, width)) else "another"} shape')
        problem.sizes = codes.shape, (height, width)
        raise DataError(problem)
    return {'size': [height, width], 'mode': mode, 'mask': mask_mode,
            'palette': [colours.get(code) for code in found.tolist()] if colours else [], 'mark': mark_of(image),
            'codes': found.tolist(), 'pixels': counts.tolist(), 'edge': tally(edge).tolist(), 'areas': areas.tolist(),
            'across': places_across(codes, found),
            'inside': (tally(codes[in_areas(codes, 0)]) if are_numbers else counts).tolist()}


def places_across(codes, found, most=32):
    """How far to the right, 0 to 1, each of the codes `found` lies on average in up to `most` rows of a mask (H, W)."""
    rows = codes[::math.ceil(len(codes) / most)]
    place, across = np.searchsorted(found, rows.ravel()), np.tile(np.linspace(0, 1, rows.shape[1]), len(rows))
    counts, sums = (np.bincount(place, weights, len(found)) for weights in (None, across))
    return np.divide(sums, counts, out=np.full(len(found), 0.5), where=counts > 0).round(3).tolist()


def in_areas(codes, noise=6, most=2**22):
    """Greys or colours (H, W) -> (H, W) whether the pixels around each are like it: not at an edge, hard or soft. Up to
    6 is noise of JPEG within an area. About `most` pixels are looked at at once, since this takes 12 bytes for each."""
    found, step = np.empty(codes.shape, bool), max(1, most // codes.shape[1])
    for top in range(0, len(codes), step):
        first = max(0, top - 1)                                        # rows above and below belong to the surroundings
        part = np.ascontiguousarray(codes[first:top + step + 1])       # a .mat goes by columns
        steps = cv2.morphologyEx(part.view(np.uint8).reshape(*part.shape, 4), cv2.MORPH_GRADIENT, np.ones((3, 3)))
        found[top:top + step] = cv2.inRange(steps, (0,) * 4, (noise,) * 4)[top - first:][:step] > 0
    return found


def mark_of(path):
    """The size of a file and a checksum of three places in it, by which copies of a file are found quickly."""
    size, checksum = os.path.getsize(path), 0
    with open(path, 'rb') as file:
        for place in (size // 4, size // 2, 3 * size // 4):
            file.seek(place)
            checksum = zlib.crc32(file.read(4096), checksum)
    return [size, checksum]


def same_file(first, second):
    """Whether two files hold the same bytes; False for folders, UNITED paths and files that are gone."""
    with contextlib.suppress(OSError, ValueError):
        return filecmp.cmp(first, second, shallow=False)
    return False


def same_shape(first, second):
    """Whether two sizes (H, W) have the same aspect ratio, give or take a pixel."""
    is_picture = min(*first, *second) > 4                              # boxes as .npy are 5 numbers wide
    tolerance = max(1, second[1] / first[1], second[0] / first[0])
    return is_picture and abs(first[0] / first[1] * second[1] - second[0]) <= tolerance or [*first] == [*second]


def may_be_scaled(mask, image, config):
    """Whether a mask of one size (H, W) may be brought to another."""
    return config['rescale_masks'] == 'stretch' or config['rescale_masks'] and same_shape(mask, image)


def mask_header(path):
    """(mode, or suffix if Pillow cannot open it; {code: colour} of a palette whose numbers count; orientation)."""
    try:
        with Image.open(path, formats=PILLOW_FORMATS) as picture:
            turned = orientation(picture)                              # decoding loses it
            colours = palette_colours(picture) if picture.mode == 'P' and palette_meaning(picture) == 'P' else {}
            return f'{picture.mode} JPEG' if picture.format == 'JPEG' else picture.mode, colours, turned
    except UNREADABLE as error:
        if getattr(error, 'errno', None) and not os.path.isdir(path):  # the drive failed, and the cache would keep it
            raise DataError(f'{path}: cannot be read: {error.strerror}') from None
    return os.path.splitext(path)[1].lower() or 'folder', {}, 1


def fingerprint(path):
    """Sizes and times of a file, of UNITED ones, or of those in a folder: while they stay, so does a cached record."""
    states = [*map(os.stat, path.split(UNITED))]
    if stat.S_ISDIR(states[0].st_mode):                                # overwriting a file does not touch its folder
        states = [entry.stat() for entry in os.scandir(path) if entry.is_file()]
    times = [max(state.st_mtime_ns, state.st_ctime_ns) for state in states]    # rsync -t keeps an old mtime
    return [sum(state.st_size for state in states), sum(times)]        # of links, a change may be to an older file


RECORDS = 31                       # version of the records: add 1 whenever what is in them changes


def cache_file(config):
    """Where the records of a data set are kept between runs: a file for each way to read it."""
    base = Path(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'))
    base = base if base.is_absolute() else Path(tempfile.gettempdir())         # some users have no home
    keys = 'in_channels', 'max_image_pixels', 'rescale_masks', 'mask_pattern', 'ignore_index'
    wish = config['mask_values'] if names_colours(config) or config['mask_values'] == 'alpha' else None
    key = json.dumps([os.path.abspath(os.path.expanduser(config['data'])), *map(config.get, keys), wish, RECORDS])
    return base / 'train_unet' / f'{hashlib.sha256(key.encode()).hexdigest()[:16]}.json'


def look_at(images, masks, config, decode=False):
    """Paths of images and of their masks (N,) -> [(record or None, what is wrong or None), ...], read in parallel or
    taken from the cache. `decode`: decode the images as well."""
    path, cache = cache_file(config), {}
    with contextlib.suppress(OSError, ValueError, TypeError):          # TypeError: JSON, but no dict
        cache = dict(json.loads(path.read_text(encoding='utf-8')))

    def look(row):
        """-> (key in the cache, [mark, record] or None, problem or None)"""
        image, mask = os.fsdecode(images[row]), os.fsdecode(masks[row])
        key = '\n'.join(map(os.path.abspath, [image, *mask.split(UNITED)]))    # a resume takes data by its whole path
        entry = None
        try:
            mark, old = fingerprint(image) + fingerprint(mask), cache.get(key)
            entry = old if old and old[0] == mark else [mark, scan_pair(image, mask, config)]
            dtype, _, channels = entry[1]['mode'].partition(' x ')     # the header of an array or a TIFF tells both
            if channels:
                convert_pixels(np.zeros((1, 1, int(channels)), dtype), image, config)
            if decode:
                with ONE_LARGE if math.prod(entry[1]['size']) > 2**24 else contextlib.nullcontext():
                    read_image(image, config)
        except DataError as error:
            return key, entry, error.problems[0]
        except OSError as error:
            return key, entry, f'{error.filename or image}: cannot be read: {error.strerror}'
        return key, entry, None

    count = len(images)
    chunks = np.array_split(np.arange(count), math.ceil(count / 32))   # handing over single rows costs time
    with ThreadPoolExecutor(min(8, num_cores())) as pool:              # on Ctrl-C map cancels what has not begun
        parts = pool.map(lambda rows: [look(row) for row in rows], chunks)
        found = list(progress(itertools.chain.from_iterable(parts), count, 'Looking at the data'))
    fresh = {key: entry for key, entry, _ in found if entry}
    with contextlib.suppress(OSError):
        if any(cache.get(key) != entry for key, entry in fresh.items()):
            write_file(path, json.dumps(fresh).encode())
    return [(None if problem else entry[1], problem) for _, entry, problem in found]


def scan(pairs, config, decode=False):
    """(the sound pairs, their records). DataError names bad files, with lines to type. `decode`: as in look_at."""
    found = look_at(pairs.images, pairs.masks, config, decode)
    problems = [problem for _, problem in found if problem]
    is_most_sound = 2 * len(problems) <= len(found)
    if is_most_sound:                                                  # else the others would not fit
        problems = [problem if hasattr(problem, 'sizes') else re.sub(r'; type in_channels=\d+$', '', problem)
                    for problem in problems]
    if problems and not (config['skip_broken'] and len(problems) < len(found)):
        are_cut_out = all('type mask_values=alpha' in problem for problem in problems) \
            and all(len(record['codes']) < 2 for record, _ in found if record)         # those sound are empty
        advice = ['to leave them out type skip_broken=True'] * (is_most_sound and not are_cut_out)
        sizes = [problem.sizes for problem in problems if hasattr(problem, 'sizes')]
        scaled = sum(same_shape(*two) for two in sizes)
        kinds = zip(('masks', 'images'), map(set, zip(*sizes)), (1, len(found) / 2))    # images often have one
        squeezed = [(kind, *seen) for kind, seen, least in kinds if len(seen) == 1 and len(sizes) > least]
        strange = Counter(mask for mask, image in sizes if mask != image[::-1])        # not turned
        crossed = (strange & Counter(image for _, image in sizes)).total()
        turned = sum(mask == image[::-1] for mask, image in sizes)
        if 2 * crossed >= len(sizes) and len({mask[0] / image[0] for mask, image in sizes}) > 1:
            advice.insert(0, f'{crossed} of these masks have the size of another of these images: are they of those?')
        elif 2 * turned > len(sizes):
            squeezed = '; if they were squeezed type rescale_masks=stretch' * (turned == len(found))
            advice.insert(0, f'{turned} of these masks have the sides of their images the other way round: if they lie '
                             f'turned by 90 degrees save them upright, as their images are{squeezed}')
        elif squeezed and scaled < len(sizes):
            (kind, (height, width)), *_ = squeezed
            advice.insert(0, f'if these {kind} were squeezed to {width} x {height} pixels type rescale_masks=stretch')
        elif scaled:
            advice.insert(0, f'if the {scaled} of the same shape show the same as their masks type rescale_masks=True')
        elif len(sizes) > len(found) / 2:
            advice.insert(0, 'if these masks were resized to other shapes type rescale_masks=stretch; else they are of '
                             'other images')
        raise DataError([*shorten(problems), *advice],
                        f'{len(problems)} of {len(found)} images or masks cannot be used')
    sound = np.array([problem is None for _, problem in found])
    kept = {name: getattr(pairs, name)[sound] for name in ('images', 'masks', 'splits', 'drawn')}
    notes = pairs.notes + shorten(f'left out: {problem}' for problem in problems)
    return dataclasses.replace(pairs, notes=notes, **kept), [record for record, _ in found if record]


def inspect_data(config, decode=False):
    """Find, look at and understand a data set -> Data. Raises DataError."""
    pairs, records = scan(find_pairs(config), config, decode)
    records = in_grey(records, config)
    firsts = turned_copies(pairs, records, copies_of(pairs, records, config), config)
    pairs = with_copies_together(pairs, firsts, config)
    if (config['mask_values'], config['ignore_index']) == ('nonzero', 255) \
            and any(is_plain(record) and 255 in record['codes'] for record in records):
        config = {**config, 'ignore_index': None}                      # 255 is white there
    pixels, images = pixels_of(records), Counter(itertools.chain.from_iterable(record['codes'] for record in records))
    values = {code: [pixels[code], images[code]] for code in pixels}
    masks, kinds = [record['codes'] for record in records], {record['mask'] for record in records}
    numbers = [[code for code in codes if code != config['ignore_index']] for codes in masks]
    place = {code: n for n, code in enumerate(sorted(values.keys() - {config['ignore_index']}))}
    counts_up = count_up([[place[code] for code in codes] for codes in numbers])        # colours too
    counts_up |= len(values) > 10 and all(kind.startswith('I') for kind in kinds)          # I: 16 bits
    in_palettes = {*palettes_of([record for record in records if record['mask'] == 'P'])} | {config['ignore_index']}
    is_read = False
    try:
        if config['mask_values'] is None:
            refuse_mixtures(records)
            refuse_numbers_beside_colours(records)
            refuse_palettes(records, pairs.class_lists)
        is_read = True
        coding = find_coding(values, pixels_of(records, 'areas'), values.keys() <= in_palettes, config, counts_up,
                             all('JPEG' in kind for kind in kinds))
    except DataError as error:
        odd = [] if counts_up else odd_masks(numbers if is_read else masks, pairs.masks)
        error.problems[1:1] = odd + (offer_names(pairs.class_lists, values) if is_read else [])
        error.problems = [line + ' num_classes=auto' * has_more_classes(line, config) for line in error.problems]
        raise
    meaning = dict(zip(values, coding.encode(np.array([*values], int)).tolist()))
    found = [{meaning[code] for code in codes} for codes in masks]     # class ids
    areas, times = by_class(pixels, meaning), Counter(itertools.chain.from_iterable(found))
    classes = {class_id: (areas[class_id], times[class_id]) for class_id in sorted(times)}
    rarity = rarities(found, pairs.splits)
    in_train = by_class(pixels_of([records[row] for row in pairs.rows('train')]), meaning)[:coding.num_classes]
    shares = in_train / max(in_train.sum(), 1)
    sizes = Counter(tuple(record['size']) for record in records)
    modes = Counter(f'{record["mode"]} image, {record["mask"]} mask' for record in records)
    marks = sorted(itertools.compress([record['mark'] for record in records], pairs.splits != SPLITS.index('test')))
    marks = hashlib.sha256(json.dumps(marks).encode()).hexdigest()
    sides = find_sides([records[row] for row in pairs.rows('train')[:1000]], meaning) if coding.num_classes > 2 else ()
    data = Data(pairs, coding, values, meaning, classes, shares, rarity, sides, sizes, modes, marks, [*pairs.notes])
    data.notes += differing_palettes(records) + doubts_of_images(pairs, records, config)
    data.notes += doubts_of_sets(pairs, records)
    data.notes += find_leaks(pairs, records, firsts, config) + doubts_of_sides(pairs, records, coding, meaning)
    data.notes += doubts_of_classes(data, found, config) + doubts_of_values(data, numbers, config)
    data.notes += doubts_of_edges(data, records, config)
    if config['class_names'] is None and config['mask_values'] is None:
        data.notes += offer_names(pairs.class_lists, values, coding)
    edges = by_class(pixels_of(records, 'edge'), meaning)              # there background usually prevails
    at_edge = edges[1] / max(edges[:IGNORE].sum(), 1)
    if coding.num_classes == 2 and len(classes) > 1 and config['mask_values'] != 'alpha' \
            and (shares[1] > 0.85 or shares[1] > 0.4 and at_edge > 0.8 and 1 - at_edge < 0.6 * (1 - shares[1])):
        line = line_that_inverts(data, kinds, parse_mask_values(config['mask_values']))
        data.notes.append(f'foreground covers {shares[1]:.1%} of the training pixels, {at_edge:.1%} along the '
                          f'edges of all masks: are the masks inverted? If so {line}')
    return data


def odd_masks(masks, paths):
    """[a line that names a mask with values that hardly another has], where these are few. masks: the codes of each."""
    often, most = Counter(itertools.chain.from_iterable(masks)), max(1, len(masks) / 20)
    odd = {path: rare for path, codes in zip(paths, masks) if (rare := sorted(c for c in codes if often[c] <= most))}
    lines = [f'{os.fsdecode(path)}: holds {", ".join(map(name_code, rare[:4]))}{", ..." * (len(rare) > 4)}, which '
             'hardly any other mask does' for path, rare in odd.items()]
    return lines * (len(lines) <= min(3, len(masks) / 4))


def rarities(found, splits):
    """How rare the rarest class but 0 of each image is (found: sets of class ids, 255 ignored) -> (pairs,): so many
    times as many training images show the commonest. 1 to 10, lest a class of one image prevail; 0: none but class 0.
    """
    often = Counter(itertools.chain.from_iterable(itertools.compress(found, splits == SPLITS.index('train'))))
    most = max((often[class_id] for class_id in often.keys() - {0, IGNORE}), default=1)
    return np.array([max((min(10, most / max(1, often[class_id])) for class_id in ids - {0, IGNORE}), default=0)
                     for ids in found], float)


def find_sides(records, meaning):
    """(a, b) if class a lies left of class b, and is about as large, in 19 of 20 masks that show both: ten or more, and
    half of those that show either. () if there are none. As eyes and lungs do they differ by their side alone, so that
    mirrored images would teach the opposite."""
    of_classes = lambda record, weights: np.bincount([meaning[code] for code in record['codes']], weights, 256)
    areas = np.array([of_classes(record, record['pixels']) for record in records]).reshape(-1, 256)
    across = np.array([of_classes(record, np.multiply(record['pixels'], record['across'])) for record in records])
    shows, across = areas > 0, across.reshape(-1, 256) / np.maximum(areas, 1)
    for a, b in itertools.combinations(1 + np.flatnonzero(shows[:, 1:IGNORE].sum(0) >= 10), 2):
        both = shows[:, a] & shows[:, b]
        if both.sum() >= max(10, shows[:, a].sum() / 2, shows[:, b].sum() / 2):
            to_right, size = np.sign(across[both, b] - across[both, a]), areas[both, a].sum() / areas[both, b].sum()
            if 2 / 3 < size < 3 / 2 and abs(to_right.mean()) >= 0.9:       # 19 of 20, less the one
                return (int(a), int(b)) if to_right.mean() > 0 else (int(b), int(a))
    return ()


def by_class(counts, meaning):
    """{code: pixels} -> (256,) the pixels of each class id"""
    return np.bincount([meaning[code] for code in counts], [*counts.values()], minlength=256)


def in_grey(records, config):
    """The records with grey values in place of colours, if all colours are grey, or nearly grey and look like noisy
    black and white; else with colours in place of greys: an editor saves what is all black in grey. Indices of palettes
    and what is ignored stay."""
    codes = {*itertools.chain.from_iterable(record['codes'] for record in records)}
    for most in (0, 32) if config['mask_values'] is None else (0,):
        if all(as_grey(code, most) < COLOUR for code in codes):
            greys = {code: as_grey(code, most) for code in codes}
            told = [record | {'codes': [*map(greys.get, record['codes'])]} for record in records]
            if not most or is_noisy(pixels_of(told), pixels_of(told, 'areas')):
                return told
    shown = codes | {*(parse_mask_values(config['mask_values']) if names_colours(config) else ())}
    as_colour = lambda code, of_palette: COLOUR + code * 0x010101 if 0 <= code < 256 and of_palette is None and (
        code != config['ignore_index'] or COLOUR + code * 0x010101 in shown) else code         # a colour is no void
    return [record | {'codes': [as_colour(*both) for both in itertools.zip_longest(record['codes'], record['palette'])]}
            for record in records]


def doubts_of_sides(pairs, records, coding, meaning):
    """[a note] where some masks are foreground along their edges with a background inside, and nearly all others are
    background there: two people have drawn them, one of them the other way round."""
    both = [row for row, record in enumerate(records)
            if coding.num_classes == 2 and {0, 1} <= {*map(meaning.get, record['codes'])}]
    counts = [[np.bincount([*map(meaning.get, records[row]['codes'])], records[row][where], 2)[:2]
               for where in ('pixels', 'edge')] for row in both]
    counts = np.array(counts, float).reshape(-1, 2, 2)                 # of each mask, whole and edge, the two classes
    whole, edge = (counts[..., 1] / counts.sum(-1).clip(1)).T
    swapped, usual = (whole > 0.5) & (edge > 0.9), edge < 0.1
    if not swapped.any() or not usual.any() or np.mean(swapped | usual) < 0.95:
        return []
    return [f'{counted(int(swapped.sum()), "mask")} with foreground along the edges, such as '
            f'{os.fsdecode(pairs.masks[both[swapped.argmax()]])}, {usual.sum()} with background: are some inverted?']


def pixels_of(records, where='pixels'):
    """{code: its pixels in these masks}; where='edge': in their first and last rows and columns; 'areas': in_areas"""
    codes, counts = (np.array([*itertools.chain.from_iterable(record[key] for record in records)], np.int64)
                     for key in ('codes', where))                      # after in_grey a code may occur twice
    found, first, place = np.unique(codes, return_index=True, return_inverse=True)
    sums = np.bincount(place, counts, len(found)).astype(np.int64)     # exact below 2**53
    order = np.argsort(first)
    return Counter(dict(zip(found[order].tolist(), sums[order].tolist())))


def palettes_of(records):
    """{index: {its colour in palettes, as a code: how many masks have it}}"""
    seen = defaultdict(Counter)
    for record in records:
        for index, colour in zip(record['codes'], record['palette']):
            if colour is not None:
                seen[index][colour] += 1
    return seen


def copies_of(pairs, records, config):
    """For each row the first row whose image has the same bytes, which is itself if there is none before. Where a mask
    holds one value only, images of other names, or of one colour, are no copies: a scan has many black slices."""
    firsts, unlike = [*range(len(records))], defaultdict(list)         # unlike: {mark: rows of files that differ}
    for row, record in enumerate(records):
        is_empty = len(record['codes']) < 2
        others = unlike[(*record['mark'], os.path.basename(pairs.images[row]) * is_empty)]     # black rims: equal marks
        first = next((other for other in others[:8] if same_file(*pairs.images[[other, row]])), row)
        is_copy = first != row and not (is_empty and flatness(os.fsdecode(pairs.images[row]), config) == 1)
        firsts[row] = first if is_copy else row
        others += [row] * (first == row)
    return firsts


def turned_copies(pairs, records, firsts, config):
    """firsts, as from copies_of, with images that were turned, mirrored or saved anew: their masks have the same counts
    of the same values, and they look alike. Of more than a hundred groups with such masks about a hundred are read; if
    more than four of five of these are of one image each, so are the others."""
    alike = defaultdict(list)
    for row, record in enumerate(records):
        if firsts[row] == row and len(record['codes']) > 1 and math.prod(record['size']) <= 2**24:
            alike[hash((*sorted(record['size']), *record['codes'], *record['pixels']))].append(row)
    groups = [rows for rows in alike.values() if 1 < len(rows) <= 8]   # there are eight ways to turn and mirror
    some = groups[::(step := len(groups) // 101 + 1)]
    like = [like_first(pairs.images[rows], config) for rows in progress(some, len(some), 'Looking for copies')]
    are_copies = sum(not any(places) for places in like) > 0.8 * len(like)
    for number, rows in enumerate(groups):
        if number % step and not are_copies:                           # not looked at
            continue
        places = [0] * len(rows) if number % step else like[number // step]
        for row, place in zip(rows, places):
            firsts[row] = rows[place]
    return [firsts[first] for first in firsts]                         # copies of a copy


def like_first(paths, config):
    """For each image the place of the first that shows the same, turned, mirrored or saved anew: its own if there is
    none before, or if it cannot be read. Compared are 32 x 32 pixels, by their spread: flat images are not alike."""
    places, seen = [*range(len(paths))], {}                            # seen: {place: small image}, all different
    for place, path in enumerate(paths):
        try:
            small = resize(read_image(os.fsdecode(path), config), 32, 32).astype(float)
        except (DataError, *UNREADABLE):                               # reported when the image is needed
            continue
        ways = [np.rot90(side, turns) for side in (small, small[:, ::-1]) for turns in range(4)]
        places[place] = next((other for other, first in seen.items()
                              if min(np.abs(first - way).mean() for way in ways) < first.std() / 20), place)
        seen.setdefault(places[place], small)
    return places


def with_copies_together(pairs, firsts, config):
    """The pairs, split anew where chance may part copies of an image (in each fold alike), with all copies on one side:
    in training if a name puts one of them there. firsts: as from copies_of."""
    if config['group_pattern'] or not pairs.drawn.any():
        return pairs
    train, val = SPLITS.index('train'), SPLITS.index('val')
    same = grouped(np.flatnonzero(np.isin(pairs.splits, (train, val))), firsts.__getitem__)
    may_part = any(len(rows) > 1 and pairs.drawn[rows].any() for rows in same.values())        # here or in another fold
    named = {firsts[row] for row in np.flatnonzero(~pairs.drawn & (pairs.splits == train))}
    drawn = grouped(np.flatnonzero(pairs.drawn), firsts.__getitem__)
    groups = [rows for first, rows in drawn.items() if first not in named]
    if not may_part or len(groups) < 2:
        return pairs
    splits = np.where(pairs.drawn, train, pairs.splits)
    splits[hold_out(groups, pairs.drawn.sum(), config)] = val
    return dataclasses.replace(pairs, splits=splits)


def find_leaks(pairs, records, firsts, config):
    """Notes on images of validation or test that are trained on too, under any name, or else on copies that are on one
    side, and on copies whose masks differ. firsts: as from copies_of."""
    copied = {firsts[row]: row for row in pairs.rows('train')[::-1]}
    copies = [row for row in np.flatnonzero(pairs.splits) if firsts[row] in copied]
    held_out, name = {firsts[row] for row in copies}, lambda paths, row: os.fsdecode(paths[row])
    trained = {row for row in pairs.rows('train') if firsts[row] in held_out}
    notes = [f'trained on too: {counted(len(copies), "image")} of validation or test, such as '
             f'{name(pairs.images, row)} as {name(pairs.images, copied[firsts[row]])}: the scores flatter'
             f'{folder_without(pairs, trained) or folders_of_splits(pairs, trained, config)}' for row in copies[:1]]
    same = [] if notes else [rows for rows in grouped(range(len(firsts)), firsts.__getitem__).values() if rows[1:]]
    apart = [rows for rows in same if len({*pairs.splits[rows].tolist()}) > 1]
    notes += [f'{counted(len(apart), "image")} of the test split validate too, such as {name(pairs.images, first)} as '
              f'{name(pairs.images, second)}: the scores of the test flatter' for first, second, *_ in apart[:1]]
    same = [] if apart else same
    count = sum(map(len, same)) - len(same)
    in_all = f' ({count} in all)' * (count > len(same))
    notes += [f'{counted(len(same), "image")} with copies{in_all}, such as {name(pairs.images, first)} and '
              f'{name(pairs.images, second)}: these are on one side' for first, second, *_ in same[:1]]
    masks = [(record['codes'], record['pixels']) for record in records]
    differ = [(first, row) for row, first in enumerate(firsts) if masks[row] != masks[first]]
    folders = lambda *rows: {os.path.dirname(name(pairs.masks, row)) for row in rows}
    differ.sort(key=lambda two: len(folders(*two)), reverse=True)
    times = f' ({len(differ)} times)' if differ[1:] else ''
    advice = ': if folders hold several tasks name those of one with images= and masks='
    return notes + [f'one and the same image has mask files that differ, {name(pairs.masks, first)} and '
                    f'{name(pairs.masks, row)}{times}{advice * (len(folders(first, row)) > 1)}'
                    for first, row in differ[:1]]


def folder_without(pairs, rows):
    """What to type for the smallest folder with a split that names tell, if it lacks the images of these rows."""
    images = [os.fsdecode(image).removeprefix(f'.{os.sep}') for image in pairs.images]  # raw/ beside processed/train
    are_in = lambda place, rows: [images[row].startswith(f'{place}{os.sep}') for row in rows]
    held = Path(shared_start([images[row] for row in np.flatnonzero(pairs.splits)]) + 'x').parent
    place = next((place for place in (held, *held.parents) if any(are_in(place, pairs.rows('train')))), None)
    return '' if not place or any(are_in(place, rows)) else f'; without those: {as_typed("data", place, True)}'


def folders_of_splits(pairs, rows, config):
    """What to type for the images in folders named after splits, if they lack those of these rows; else ''."""
    word, root = re.compile(rf'(?i)(?<![a-z])({LONG_SPLIT_WORDS})(?![a-z])'), os.path.expanduser(config['data'])
    place = lambda path: relative(os.path.dirname(os.fsdecode(path).split(UNITED)[0]), root)
    named = [row for row, image in enumerate(pairs.images) if read_place(place(image))[0]]
    is_told = {*named} & {*pairs.rows('train')} and not rows & {*named}
    sides = {'images': pairs.images, 'masks': pairs.masks} if is_told else {}
    line = {key: word.sub('*', place(paths[named[0]])) for key, paths in sides.items()}
    with contextlib.suppress(UserError):                               # images/ beside train/images/ and test/images/
        if line and {*find_pairs(config | line).images.tolist()} == {*pairs.images[named].tolist()}:
            return '; without those: ' + ' '.join(as_typed(key, value, True) for key, value in line.items())
    return ''


def doubts_of_images(pairs, records, config):
    """Notes on a band taken for alpha, on mixed depths, on images turned upright, on a photograph among the masks."""
    notes, wide, modes = [], config['in_channels'] + 1, {record['mode'] for record in records}
    counts = [len(record['codes']) for record in records]
    if max(counts) > max(1000, 20 * sorted(counts)[(len(counts) - 1) * 9 // 10]):
        mask = os.fsdecode(pairs.masks[np.argmax(counts)])
        notes.append(f'{mask} holds {max(counts)} values, far more than the others: is it a photograph?')
    if modes & {2: {'uint8 x 2'}, 4: {'uint8 x 4', 'RGBA'}}.get(wide, set()):
        notes.append(f'band {wide} of the images is taken for alpha and left out; in_channels={wide} takes it')
    if {'uint8', 'uint16'} <= {*map(image_dtype_of, modes)}:
        notes.append('some images have 8 bits, others 16, all of which become 0 to 1: those that use but 12 of the 16 '
                     'bits are black beside the others')
    turned = [row for row, record in enumerate(records) if 'EXIF' in record['mode']]
    tells = [row for row in turned if len({*records[row]['size']}) == 2 and records[row]['mode'][-2] in '5678']
    if turned and not tells:                                           # else the sizes of the masks show them upright
        notes.append(f'{counted(len(turned), "image")} turned upright, as the EXIF tag says, such as '
                     f'{os.fsdecode(pairs.images[turned[0]])}: are the masks upright? Look at samples.png')
    return notes


def doubts_of_sets(pairs, records):
    """[a note] where all images of one place have a sixteenth of the pixels, or fewer, of all those of another: patches
    and what they were cut from, or two sets. Splits of a place, and folders that differ in numbers, count as one."""
    def place_of(row):
        _, _, kind, rest = read_place(os.path.dirname(os.fsdecode(pairs.images[row])))
        return re.sub(r'\d+', '*', f'{kind}/{rest}')

    places = [*grouped(range(len(records)), place_of).values()]
    if len(places) < 2 or min(map(len, places)) < 4:
        return []
    areas = lambda rows: [math.prod(records[row]['size']) for row in rows]
    small, large = min(places, key=lambda rows: max(areas(rows))), max(places, key=lambda rows: min(areas(rows)))
    if 16 * max(areas(small)) > min(areas(large)):
        return []
    few, many = (os.fsdecode(pairs.images[rows[0]]) for rows in (small, large))
    return [f'all images beside {few} are far smaller than those beside {many}: if they are patches of these, or '
            'another set, name one of the two by images= and masks=']


def doubts_of_classes(data, found, config):
    """Notes on classes that training or validation lacks. found: the class ids of each mask."""
    notes, count = [], data.coding.num_classes
    scored = range(int(count == 2), count)                             # of two classes the foreground alone is scored
    are_lacking = lambda rows: {i for i in data.classes if i in scored}.difference(*(found[row] for row in rows))
    unseen = [str(i) for i in range(count) if not data.shares[i] and data.shares[1:].any()]
    if unseen:
        notes.append(f'no training mask has class {", ".join(shorten(unseen))}: what is not seen is not learnt, yet '
                     'counts in the scores where it is true or predicted')
    held_out = np.flatnonzero(data.pairs.splits == SPLITS.index('val'))
    lacking = are_lacking(held_out)
    if not len(held_out):
        notes.append('no validation images: the training images are used, so the scores prove nothing')
    elif {*itertools.chain.from_iterable(found[row] for row in held_out)} == {IGNORE}:
        notes.append('all pixels of the validation masks are ignored: no epoch has a score, and the last one is kept')
    elif lacking:
        names = ', '.join(shorten(map(str, sorted(lacking))))
        drawn = np.flatnonzero(data.pairs.drawn)
        seed = seed_for_all(drawn, held_out, are_lacking, config)
        advice = f'; try seed={seed}' if seed is not None else '; another seed or val_fraction draws other images' \
            if any(sum(i in found[row] for row in drawn) > 1 for i in lacking) \
            else ''.join(f'; {os.fsdecode(data.pairs.masks[row])} alone shows it' for row in drawn
                         if lacking <= found[row]) * (len(lacking) == 1)
        notes.append(f'no validation mask has class {names}: that scores 0 where it is found, else it is left out'
                     + advice * bool(lacking - are_lacking(drawn)))     # else test images alone show it
    rarity = data.rarity[data.pairs.rows('train')]
    if least_shown(rarity, config):
        notes.append(f'{np.mean(rarity > 0):.0%} of the training images show foreground: they come more often, to be '
                     f'{config["oversample_foreground"]:.0%} of an epoch (oversample_foreground=0: each image once)')
    return notes


def seed_for_all(rows, held_out, are_lacking, config):
    """The first seed that draws all classes for both sides of a split of these rows; None if none of the first 200
    (fewer of over 10,000 rows) does, where groups are drawn, or if other rows are `held_out` than the draw's: files or
    copies had a part in it. are_lacking(rows): the classes that are in none of them."""
    draw = lambda seed: hold_out([[row] for row in rows], len(rows), config | {'seed': seed})
    if len(rows) < 2 or config['group_pattern'] or are_lacking(rows) or {*draw(config['seed'])} != {*held_out}:
        return None
    for seed in range(min(200, 2 * 10**6 // len(rows))):               # a second or so
        held = draw(seed)
        if not are_lacking(held) and not are_lacking(np.setdiff1d(rows, held)):
            return seed
    return None


def doubts_of_edges(data, records, config):
    """[a note] if several numbers taken for classes have a pixel of another kind beside nearly each of their own, and
    lie between two others: where masks are resized with interpolation, edges have such numbers."""
    if config['mask_values'] is not None or data.coding.table is None:
        return []
    pixels, inside = pixels_of(records), pixels_of(records, 'inside')
    classes = sorted(code for code in pixels if 0 <= code < 255 and data.meaning[code] != IGNORE)
    solid = [code for code in classes if 20 * inside[code] > pixels[code]]
    edges = [code for code in classes if code not in solid and solid and solid[0] < code < solid[-1]]
    if len(edges) < 2 or share_of(edges, pixels) > 0.05:
        return []
    table = numbered({*classes} - {*edges}) | dict.fromkeys(edges, IGNORE)
    return [f'{", ".join(map(name_code, edges))}: in lines of one or two pixels alone, and between other numbers, as '
            'edges are where masks were resized with interpolation; if so type '
            f'mask_values={suggest(table)}, which ignores them']


def doubts_of_values(data, masks, config):
    """Notes on numbers taken for classes that may be ids of objects, on a rare 0, which may be no class, and on classes
    of a few pixels. masks: the codes of each mask, without the ignored one."""
    falling = falls([images for code, (_, images) in sorted(data.values.items()) if 0 < code < 255])
    falling &= 2 * sum(codes == [*range(len(codes))] for codes in masks) > len(masks)     # most leave out no number
    count = data.coding.num_classes
    few = count > 20 and 3 * np.median([len(codes) for codes in masks]) < count
    up_to = {(*range(n),) for n in range(2, count + 1)}                # one object here, two there, three, ...
    nested = count > 3 and {*map(tuple, masks)} - {(), (0,)} == up_to
    is_deep = count > 4 and all(', I' in mode for mode in data.modes)    # tracked cells keep theirs: nothing falls
    guessed = config['num_classes'] == 'auto' and config['mask_values'] is None
    signs = {'most masks hold few of the numbers': few,
             'each higher number occurs in fewer masks': nested or falling and count > 5,
             'the masks have more than 8 bits': is_deep}
    notes = [f'{sign}: if these are ids of objects, not classes, type mask_values=nonzero'
             for sign, is_seen in signs.items() if is_seen and guessed][:1]
    if guessed and count > 3 and 0 < data.shares[0] < 1 / (4 * count) and data.coding.table.get(1) == 1:       # LoveDA
        table = {0: IGNORE} | {code: code - 1 for code in range(1, count)}
        notes.append(f'0 covers {data.shares[0]:.2%} of the training pixels: if it marks what has no label type '
                     f'mask_values={suggest(table)}')
    classes = {code: pixels for code, (pixels, _) in data.values.items() if data.meaning[code] != IGNORE}
    rare = 1e-5 * sum(classes.values())
    slips = [code for code, pixels in classes.items() if pixels < min(10 * data.values[code][1], rare)]
    if guessed and count > 2 and slips:                                # where objects overlap, or masks were resized
        table = numbered(classes.keys() - slips) | dict.fromkeys(slips, IGNORE)
        notes.append(f'{", ".join(map(name_code, slips))}: {sum(map(classes.get, slips))} pixels of '
                     f'{sum(data.values[code][1] for code in slips)} masks; if they are slips type '
                     f'mask_values={suggest(table)}, which ignores them')
    return notes


def count_up(masks):
    """Whether most masks hold exactly 0 to n, with many different n, as ids of objects do. masks: the codes of each."""
    some = [codes for codes in masks if codes not in ([], [0])]        # empty ones are of both
    highest = [codes[-1] for codes in some if codes == [*range(len(codes))]]
    different = len({*highest}) + ([0] in masks)
    return len(highest) > 0.7 * len(some) and different > min(3, len(masks) - 1) > 1 and max(highest) > 3


def line_that_inverts(data, kinds, wish):
    """What to type if foreground and background are swapped. kinds: modes of the masks; wish: mask_values, parsed."""
    coding = data.coding
    if kinds == {'folder'}:
        return 'invert the files: what is bright in any of an image is united'
    if coding.table is None:
        return f'type mask_values="{">" if coding.below else "<"}{coding.threshold + (not coding.below)}"'
    meaning = wish if isinstance(wish, dict) and {0, 1} <= {*wish.values()} else data.meaning  # wish: without noise
    if len(meaning) > MOST_CLASSES:                                    # of a wish that does not name 0, with noise
        return 'invert the files'
    return f'type mask_values={suggest({code: {0: 1, 1: 0}.get(i, IGNORE) for code, i in meaning.items()})}'


def falls(counts):
    """Whether higher values occur in ever fewer masks, as ids of objects do: they begin with 1 in every mask."""
    return len(counts) > 4 and all(a >= b for a, b in itertools.pairwise(counts)) and counts[-1] < counts[0] / 2


def is_plain(record):
    """Whether a mask is stored as black and white: with 1 bit, or with a palette of these two."""
    is_own = record['mask'] == 'P' and not record['palette'] and {*map(as_grey, record['codes'])} <= {0, 255}
    return record['mask'] == '1' or is_own


def refuse_mixtures(records):
    """DataError for masks of 0 and 1, or of classes, beside others of 0 and 255, and for masks of numbers beside black
    and white ones (is_plain): only the user knows what 255 or white means there."""
    shown = [(codes, 'JPEG' in record['mask']) for record in records if (codes := set(record['codes']) - {0})]
    levels, is_bright = [codes for codes, _ in shown], lambda codes: 223 <= max(codes) < COLOUR
    has_bright_jpeg = any(is_lossy and is_bright(codes) for codes, is_lossy in shown)
    has_noise = lambda codes, is_lossy: is_lossy and has_bright_jpeg or len(codes) > 16 and is_bright(codes)
    sharp = [codes for codes, is_lossy in shown if not has_noise(codes, is_lossy)]
    ones, tops, noisy = sharp.count({1}), sharp.count({255}) + sharp.count({65535}), len(shown) - len(sharp)
    if ones and tops + noisy and ones + tops + noisy == len(levels):
        top = 65535 if {65535} in levels else 255
        lines = [f'if {top} is foreground too type mask_values={suggest({1: 1, 255: 1, top: 1})}',
                 f'if {top} means ignored type mask_values={suggest({1: 1, top: IGNORE})}']
        if noisy:
            lines = ['some with noise or soft edges between: save all of them alike, sharp, as PNG']
        raise DataError([f'{ones} masks hold 0 and 1, {tops + noisy} others 0 and {top}', *lines],
                        'the mask values are not clear')
    kinds = {record['mask'] for record in records                      # that show white
             if is_plain(record) and any(map(as_grey, record['codes']))}
    rest = [record for record in records if not is_plain(record)]
    counts = pixels_of(rest)
    others = {*map(as_grey, counts)}
    plain = sorted(others - {255, 65535})
    has_numbers = plain and (plain[-1] > 1 if 255 not in others else plain[-1] > 0 and '1' in kinds)
    if kinds and has_numbers and not is_noisy(counts, pixels_of(rest, 'areas')):
        lines = ['some masks are of black and white alone, others hold numbers: save all of them alike']
        shown, white = {colour for record in records for colour in record['palette']} - {None}, COLOUR + 0xffffff
        if white in shown and all(as_grey(colour) < COLOUR for colour in shown):
            lines.append(f'if white is the foreground in all type mask_values={suggest({white: 1})}')
        if 255 not in others and plain[-1] < COLOUR:
            table = suggest({code: code for code in plain} | {255: 1})
            lines.append(f'if white is class 1 type mask_values={table}' if len(plain) <= MOST_CLASSES else
                         'if all but 0 (black) is foreground type mask_values=nonzero')
        if 255 in others and 127 < plain[-1] < COLOUR:
            lines.append('if bright is foreground type mask_values=">127"')
        raise DataError(lines, 'the mask values are not clear')
    numbers = {*itertools.chain.from_iterable(levels)} - {255}
    are_classes = len(numbers) > 1 and numbers == {*range(1, len(numbers) + 1)}
    if are_classes and levels.count({255}) > 1 and not any(found > {255} for found in levels):
        tables = [suggest({number: number for number in sorted(numbers)} | {255: meant}) for meant in (1, IGNORE)]
        raise DataError([f'{levels.count({255})} masks hold 0 and 255, others classes up to {max(numbers)}, none both',
                         f'if 255 is class 1 there type mask_values={tables[0]}',
                         f'if 255 means ignored type mask_values={tables[1]}'], 'the mask values are not clear')


def refuse_numbers_beside_colours(records):
    """DataError where some masks hold class numbers and others colours: a table of both would have each class twice."""
    of_grey, of_colour = ({*pixels_of([record for record in records if record['mask'].startswith('RGB') == is_colour
                                       and not record['palette'] and 'JPEG' not in record['mask']])}
                          for is_colour in (False, True))
    numbers = sorted(code for code in map(as_grey, of_grey - of_colour) if 0 < code < 255)
    if numbers and max(of_colour - of_grey, default=0) >= COLOUR and numbers[-1] <= len(numbers) + 2:
        raise DataError([f'some masks hold numbers ({", ".join(map(str, numbers[:12]))}), others colours: if both mean '
                         'the same classes save all of them alike, or name one kind (masks=..., or a list)',
                         'if all but 0 (black) is foreground in all type mask_values=nonzero'],
                        'the mask values are not clear')


def refuse_palettes(records, lists):
    """DataError for palettes that number their colours anew in each file, and for palettes beside masks of the same
    colours: there the colours count. lists: text files that may list the classes."""
    seen = palettes_of(records)
    numbers = Counter(itertools.chain.from_iterable(seen.values()))    # colour -> how many indices it has
    moved = {colour for colour, count in numbers.items() if count > 1 and colour != COLOUR}
    drawn = Counter({code: pixels for code, pixels in pixels_of(records).items() if code >= COLOUR})
    beside = 10 * sum(drawn[colour] for colour in numbers) > 9 * drawn.total() > 0
    if beside or any(moved & colours.keys() and len(colours) > 1 for colours in seen.values()):
        lines = ['palette masks number their colours anew in each file' if moved else
                 'some masks number their colours in a palette, others hold colours']
        shown = numbers.keys() | {colour for colour, pixels in drawn.items() if 1000 * pixels > drawn.total()}
        if len(shown) <= MOST_CLASSES:
            lines += offer_names(lists, {colour: (1, 1) for colour in shown})
            lines.append(f'if the colours are the classes type mask_values={suggest(numbered(shown))}')
        if len(seen.get(0, ())) == 1 < len(seen) <= MOST_CLASSES:
            are_ids = falls([seen[index].total() for index in sorted(seen) if index])
            lines.insert(1 if are_ids else len(lines), 'if each number is an object, so that all but 0 is foreground, '
                                                       'type mask_values=nonzero')
        table = suggest({index: index for index in sorted(seen)[:MOST_CLASSES]})
        lines += [f'if it is the numbers that count type mask_values={table}'] * (not drawn)      # colours have none
        raise DataError(lines, 'the mask values are not clear')


def differing_palettes(records):
    """[a note] if one index has several colours, and so may not mean the same everywhere; else []."""
    for code, colours in palettes_of(records).items():
        if len(colours) > 1:
            found = ', '.join(f'#{colour - COLOUR:06x} in {count}' for colour, count in colours.most_common(4))
            return [f'palette masks differ: {code} is {found} masks. The numbers are taken, not the colours; if the '
                    'colours are meant name them in mask_values']
    return []


def describe_data(data, config):
    """The lines that check prints: pairs, sizes, a table of values, classes and their shares, notes."""
    counts = ', '.join(f'{count} {split}' for split, count in
                       zip(SPLITS, np.bincount(data.pairs.splits, minlength=len(SPLITS))) if count)
    sizes = ', '.join(f'{w} x {h} ({n})' for (h, w), n in data.sizes.most_common(4))
    more = f' and {len(data.sizes) - 4} more sizes' if len(data.sizes) > 4 else ''
    modes = ', '.join(f'{n} {mode}' for mode, n in data.modes.most_common(6))
    lines = [f'{len(data.pairs.images)} pairs ({counts}), paired by {data.pairs.rule}',
             f'sizes (width x height): {sizes}{more};  {modes}',
             f'masks: {data.coding.words}', '   value -> class                 pixels   images']
    names = class_names(config, data.coding.num_classes)
    total = sum(pixels for pixels, _ in data.values.values())
    rows = [(name_code(code), data.meaning[code], *data.values[code]) for code in sorted(data.values)]
    if len(rows) > (max(MOST_CLASSES, 2 * len(data.classes)) if data.coding.table else 16):
        rows = [('many', i, *counts) for i, counts in data.classes.items()]
    for value, i, pixels, images in rows:
        name = 'ignored' if i == IGNORE else f'{i} {names[i]}'
        lines.append(f'{value:>8} -> {name:<18} {pixels / total:>10.3%} {images:>8}')
    return lines + data.notes


def class_names(config, num_classes):
    """The user's names of the classes, or stand-ins. ConfigError if there are more or fewer names than classes."""
    if names := config['class_names']:
        if len(names) != num_classes:
            raise ConfigError(f'class_names={names}: {counted(len(names), "name")} for {num_classes} classes, 0 to '
                              f'{num_classes - 1}')
        return [clean(name) for name in names]
    return ['background', 'foreground'] if num_classes == 2 else [f'class {i}' for i in range(num_classes)]


# ===== data: the built-in demo set ====================================================

DEMO_FOLDER = Path('runs') / 'demo_data'


def draw_demo(number, size=160):
    """Pebbles on gravel, as often darker as lighter: no threshold finds them -> (image (H, W, 3), mask (H, W))."""
    draw = np.random.default_rng(number)
    y, x = np.mgrid[:size, :size].astype(np.float32)

    def cloud(grain):
        small = draw.random((max(2, size // grain), max(2, size // grain), 1)).astype(np.float32)
        return cv2.resize(small, (size, size), interpolation=cv2.INTER_CUBIC)[..., None]

    ground = draw.uniform(70, 160) + draw.uniform(-18, 18, 3)
    image = ground + 70 * (cloud(32) - 0.5) + 60 * (cloud(4) - 0.5) + 45 * (cloud(2) - 0.5)
    mask = np.zeros((size, size), np.uint8)
    for _ in range(draw.integers(5, 16)):
        radius = draw.choice([7, 12, 20, 30]) * draw.uniform(0.8, 1.2) * size / 160
        cx, cy = draw.uniform(0, size, 2)
        angle, flat = draw.uniform(0, np.pi), draw.uniform(0.55, 1)
        u = ((x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)) / radius
        v = ((y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)) / radius / flat
        bump = 1 + draw.uniform(0, 0.12) * np.sin(3 * np.arctan2(v, u) + draw.uniform(0, 6))
        distance = np.sqrt(u * u + v * v) / bump
        away = np.hypot((x - cx - radius * 0.25) / radius, (y - cy - radius * 0.25) / radius)
        image *= 1 - np.clip(1.25 - away, 0, 0.4)[..., None]           # the shadow
        inside = distance < 1
        light = 30 * (-u * np.cos(angle) - (y - cy) / radius)          # lit from above
        colour = ground + draw.choice([-1, 1]) * draw.uniform(0, 55) + draw.uniform(-14, 14, 3)
        body = colour + (light * (1 - 0.3 * distance))[..., None] + 12 * (cloud(6) - 0.5)
        image[inside], mask[inside] = body[inside], 255
    image *= 0.75 + 0.5 * (x * draw.uniform(-1, 1) + y * draw.uniform(-1, 1))[..., None] / size
    image += draw.normal(0, 7, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8), mask


def write_demo(folder, seed=0, num_train=240, num_val=60):
    """Draw the demo set as PNG files under folder/images and folder/masks, unless it is there already."""
    done, count = folder.with_name(f'.{folder.name}_is_complete'), num_train + num_val
    if done.exists() and folder.is_dir():                              # rm -r runs/* leaves the hidden mark alone
        return folder
    done.unlink(missing_ok=True)                                       # until all is there again
    for number in progress(range(count), count, 'Drawing the demo set'):
        split = 'train' if number < num_train else 'val'
        for kind, array in zip(('images', 'masks'), draw_demo(seed * 100_003 + number)):
            path = folder / kind / split / f'pebbles_{number:03d}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f'.{os.getpid()}_{path.name}')       # another run may read the file by now
            Image.fromarray(array).save(part)
            part.replace(path)
    done.touch()
    return folder


# ===== data: augmenting and loading ===================================================

IN_THE_MODEL = ('Normalize', 'ToFloat', 'FromFloat', 'ToTensorV2', 'ToTensor3D')      # the network does it itself
WORKER_TIMEOUT = 300               # seconds after which a data worker that delivers nothing is replaced


def around(config):
    """What lies around an image, (C,) as images are stored: their mean, which is zero for the network, as it is around
    images in prediction. Raw zeros may be a hundred deviations away, and rule the statistics of all norms."""
    mean = np.broadcast_to(np.array(0.0 if config['mean'] == 'auto' else config['mean']), config['in_channels'])
    return (mean.round().clip(0, 255) if config['image_dtype'] == 'uint8' else mean).astype(config['image_dtype'])


def border(config):
    """How albumentations fills what lies around an image. Of more than 4 channels OpenCV fills with zeros alone: float
    images are augmented as differences from what lies around them, where the steps are our own."""
    fill = around(config).tolist() if config['in_channels'] <= 4 else 0
    return {'border_mode': cv2.BORDER_CONSTANT, 'fill': fill, 'fill_mask': IGNORE}


def level_and_spread(config):
    """Mean and deviation of all channels; those of an average photograph while they are not known."""
    known = 'auto' not in (config['mean'], config['std'])
    return [max(1e-6, float(np.mean(config[key]))) for key in ('mean', 'std')] if known else [100.0, 50.0]


def build_jitter(config, most, chance):
    """Brightness and contrast of 8 bits, changed by up to `most` of 255 and of itself, but by no more than suits the
    spread of the images (of pale ones, with a deviation of 3, a fifth of the scale would leave nothing), and no more
    than leaves their mean a deviation away from black and from white, where all pixels are alike."""
    level, spread = level_and_spread(config)
    down, up = (max(0.0, room - spread) for room in (level, 255 - level))
    brighter = min(most, most * spread / 50)
    contrast = min(most, 2 * most * spread / level, 2 * up / level)
    return A.RandomBrightnessContrast((-min(brighter, down / 255), min(brighter, up / 255)), contrast, p=chance)


def build_augmentation(config):
    """The albumentations pipeline of one training sample, after resizing or cropping; None: nothing to do.
    Stronger changes slow learning, but keep the network from memorising images that it sees often. By default images
    are only mirrored in runs of up to 25 epochs; in runs of 32 they are changed further with a chance of 1 in 10, in
    runs of 60 or more of 1 in 2. Raises ConfigError for a file that is no saved pipeline."""
    wish, dtype, edge = config['augment'], config['image_dtype'], border(config)
    mirrored = config['mirror'] is not False
    if wish == 'none':
        return None
    if wish not in ('default', 'strong'):
        return load_augmentation(wish, (*config['image_size'], config['in_channels']), dtype)
    if wish == 'strong':
        (height, width), noise = config['image_size'], min(1, level_and_spread(config)[1] / 255)
        turns = A.D4(p=1) if height == width and mirrored else A.VerticalFlip(p=0.5)
        shapes = [turns,
                  A.Affine(scale=(0.7, 1.4), rotate=(-30, 30), translate_percent=(-0.06, 0.06), p=0.8, **edge),
                  A.ElasticTransform(alpha=60, sigma=8, p=0.3, **edge)]
        colours = [build_jitter(config, 0.3, 0.5), A.RandomGamma((70, 140), p=0.3),
                   A.GaussianBlur(p=0.15), A.GaussNoise(std_range=(0.1 * noise, 0.4 * noise), p=0.2)]
    else:
        chance = min(0.5, max(0, config['num_epochs'] - 25) / 70)
        shapes = [A.Affine(scale=(0.85, 1.2), rotate=(-15, 15), translate_percent=(-0.06, 0.06), p=chance, **edge)]
        colours = [build_jitter(config, 0.2, chance)]
    colours = colours if dtype == 'uint8' else []                      # other depths have no known range to jitter in
    return A.Compose([*[A.HorizontalFlip(p=0.5)] * mirrored, *shapes, *colours])


def load_augmentation(path, shape, dtype):
    """A pipeline saved with A.to_dict as JSON or YAML, tried on an image of this shape (H, W, C) and dtype. It can only
    name transforms of albumentations itself. Those of IN_THE_MODEL are left out; masks are filled with IGNORE. Raises
    ConfigError for a file that is no pipeline, or fails on such an image."""
    try:
        text = Path(path).read_text(encoding='utf-8').replace('!!python/tuple', '')        # yaml.dump's tuples
        saved = (yaml.safe_load if str(path).endswith(('.yaml', '.yml')) else json.loads)(text)
        refuse_explosion(saved, most=10**5)                            # aliases of YAML
        pipeline = A.from_dict(saved)
        pipeline = pipeline if isinstance(pipeline, A.Compose) else A.Compose([pipeline])
        if any(getattr(step, 'max_value', None) not in (None, 1, 255, 65535) for step in all_steps(pipeline)):
            raise ValueError('here 8-bit images are divided by 255, 16-bit ones by 65535, and steps may cut off at 1: '
                             'leave out ToFloat and FromFloat, and what suits their max_value alone')
        left_out, is_in_model = [], lambda step: type(step).__name__ in IN_THE_MODEL
        for step in all_steps(pipeline):
            if isinstance(step, (A.Compose, A.Sequential)):            # these may be nested
                left_out += [type(inner).__name__ for inner in step.transforms if is_in_model(inner)]
                step.transforms = [inner for inner in step.transforms if not is_in_model(inner)]
            step.deterministic = False                                 # ReplayCompose sets it
            fills = getattr(step, 'border_mode', None) == cv2.BORDER_CONSTANT and getattr(step, 'pad_if_needed', True)
            if fills and hasattr(step, 'fill_mask'):                   # not of holes
                step.fill_mask = IGNORE
            if getattr(step, 'area_for_downscale', None):              # 'image_mask' would mix class ids
                step.area_for_downscale = 'image'
            resizes = isinstance(step, A.CropAndPad) or hasattr(step, 'area_for_downscale')    # else half a pixel off
            step.mask_interpolation = cv2.INTER_NEAREST_EXACT if resizes else cv2.INTER_NEAREST    # no warp knows EXACT
        pipeline = A.Compose(pipeline.transforms, p=pipeline.p)
        pipeline.cuts_off = try_augmentation(pipeline, shape, dtype)
    except (*UNREADABLE, yaml.YAMLError, cv2.error, A.augmentations.crops.transforms.CropSizeError) as error:
        raise ConfigError(f'augment={path!r}: not a pipeline saved with A.to_dict that suits these images: '
                          f'{in_words(error)}') from None
    if left_out:
        log.info('augment=%s: %s left out, the network does that itself', path, ', '.join(left_out))
    return pipeline


def try_augmentation(pipeline, shape, dtype):
    """Whether some step limits float images to 0..1, which suits 16-bit images but no float images beyond. ValueError
    if it returns other channels or another dtype than it got, a mask of another size, or images of several sizes."""
    trial, sizes, cuts_off = copy.deepcopy(pipeline), set(), False
    for step in all_steps(trial):
        step.p = 1                                                     # try the rarely applied ones too
    for tried in [trial] * 8 + [copy.deepcopy(pipeline)] * 8:
        made = tried(image=np.full(shape, 50, dtype), mask=np.zeros(shape[:2], np.uint8))
        pixels = np.atleast_3d(made['image'])
        sizes.add(pixels.shape)
        cuts_off |= dtype == 'float32' and 0 < pixels.max() <= 1
        if pixels.shape != (*made['mask'].shape, shape[2]) or pixels.dtype != dtype or len(sizes) > 1:
            raise ValueError(f'of an image of {dtype} {shape} it makes {pixels.dtype} {sorted(sizes)} and a mask '
                             f'{made["mask"].shape}' + '; end it by a crop or a resize to one size' * (len(sizes) > 1))
    for height, width, _ in sizes - {shape}:
        warn(f'augment: makes images of {width} x {height} pixels, while {shape[1]} x {shape[0]} are validated and '
             f'predicted: unless they are cut out of these, type image_size={height}x{width}')
    return bool(cuts_off)


def all_steps(step):
    """A transform and all those that it holds."""
    yield step
    for inner in getattr(step, 'transforms', ()):
        yield from all_steps(inner)


def resize(array, height, width, is_mask=False):
    """(H, W[, C]) -> (height, width[, C]); images take an area mean when they shrink, masks the nearest value or, down
    to half their size, the one that covers most of a pixel."""
    if array.shape[:2] == (height, width):
        return array
    less = min(array.shape[0], height), min(array.shape[1], width)
    if is_mask and less == (height, width):
        return shrink_mask(array, height, width)
    if less not in (array.shape[:2], (height, width)):                 # one side shrinks, the other grows
        return resize(resize(array, *less, is_mask), height, width, is_mask)
    mode = cv2.INTER_NEAREST_EXACT if is_mask else cv2.INTER_AREA if less == (height, width) else cv2.INTER_LINEAR
    if array.ndim == 2 or array.shape[2] <= 4:
        return cv2.resize(array, (width, height), interpolation=mode).reshape(height, width, *array.shape[2:])
    return np.stack([cv2.resize(array[..., c], (width, height), interpolation=mode) for c in range(array.shape[2])], -1)


def nearest_value(mask, height, width):
    """(H, W) -> (height, width): the value of the nearest pixel. Of a side divided by 4 two are equally near, and the
    second of them each time would shift a mask by half a pixel against its image, and all that is learnt: as on a
    chessboard, each has its turn."""
    at = lambda turn, old, new: ((2 * np.arange(new) + 1) * old - turn) // (2 * new)
    second, first = (mask[at(turn, mask.shape[0], height)][:, at(turn, mask.shape[1], width)] for turn in (0, 1))
    return np.where(np.add(*np.ogrid[:height, :width]) % 2, first, second)


def shrink_mask(mask, height, width):
    """(H, W) uint8 -> (height, width): the value with the largest area in each pixel; of equal areas that of the
    nearest pixel, so that a line of one pixel is dashed, not lost. 2 ms for 512 x 512 pixels of two classes. Of a side
    more than halved the value of the nearest pixel, or thin things would be lost."""
    nearest = best = nearest_value(mask, height, width)
    if mask.shape[0] > 2 * height or mask.shape[1] > 2 * width:
        return nearest
    most = np.full((height, width), -1, np.float32)
    for value in np.flatnonzero(np.bincount(mask.ravel())).tolist():
        area = cv2.resize((mask == value).astype(np.float32), (width, height), interpolation=cv2.INTER_AREA)
        area += np.float32(1e-3) * (nearest == value)
        best, most = np.where(area > most, np.uint8(value), best), np.maximum(area, most)
    return best


def shrink_by_rows(image, height, width, step=256):
    """The area mean of TiffRows, (H, W, C) -> (height, width, C), with `step` of its rows in memory at a time."""
    edges, total = np.arange(height + 1) * image.shape[0] / height, 0
    for first in range(0, image.shape[0], step):
        band = image[first:first + step]
        rows = np.arange(first, first + len(band))
        share = np.minimum(edges[1:, None], rows + 1) - np.maximum(edges[:-1, None], rows)    # (new rows, rows)
        total = total + np.tensordot(share.clip(0), resize(band.astype(np.float32), len(band), width), 1)
    mean = total * (height / image.shape[0])
    return mean.round().astype(np.uint8) if band.dtype == np.uint8 else mean.astype(np.float32)


def around_foreground(image, mask, height, width, rng):
    """The part of an image and its mask (H, W), at most height x width pixels, with a pixel of any class but 0 in it;
    the class (each as likely), its pixel, and where that lies are drawn at random. All of both if there is none."""
    kinds = 1 + np.flatnonzero(cv2.calcHist([mask], [0], None, [256], [0, 256])[1:IGNORE])
    if not len(kinds):
        return image, mask
    shows = mask == rng.choice(kinds)
    counts = np.count_nonzero(shows, axis=1)
    row = rng.choice(len(counts), p=counts / counts.sum())
    pixel = row, rng.choice(np.flatnonzero(shows[row]))
    top, left = (rng.integers(max(0, at - side + 1), max(0, min(at, size - side)) + 1) if size > side else 0
                 for at, side, size in zip(pixel, (height, width), mask.shape))
    part = np.s_[top:top + height, left:left + width]
    return image[part], mask[part]


def shared_zeros(shape, dtype=np.uint8):
    """An array of zeros in anonymous memory: forked workers share it, and the size of /dev/shm does not limit it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(size, 1)))


class SegmentationDataset(torch.utils.data.Dataset):
    """Samples {'image': (C, H, W), 'mask': (H, W) uint8, 'index': place in the split, '_left_out': whether it could not
    be read}; validation adds 'full_mask' at original size. The key is (epoch, index), so that augmentation is a
    function of (seed, epoch, index): the same for any number of workers, after a resume and on any rank.
    (albumentations alone would repeat itself with workers.) An index beyond the number of images is one of them once
    more, augmented otherwise: see WindowSampler."""

    def __init__(self, data, split, config, is_training):
        self.pairs, self.coding, self.config = data.pairs, data.coding, config
        self.rows = data.pairs.rows(split)
        self.rarity = data.rarity[self.rows]
        self.is_training, self.is_mixed = is_training, find_image_dtype(data) == 'mixed'
        self.largest = max(map(math.prod, data.sizes))                 # pixels
        self.height, self.width = config['image_size']
        self.is_resized = config['size_policy'] == 'resize'
        self.aims = not self.is_resized and config['oversample_foreground'] > 0        # crops at foreground
        self.augmentation = build_augmentation(config) if is_training else None
        self.cuts_off = getattr(self.augmentation, 'cuts_off', False)
        is_shifted = is_training and config['in_channels'] > 4 and config['image_dtype'] == 'float32'
        is_shifted &= config['augment'] in ('none', 'default', 'strong')           # these look at no values
        self.zero = around(config) if is_shifted else 0                # of images while they are augmented, see border
        if not self.is_resized and is_training:
            cut = A.RandomCrop(self.height, self.width, pad_if_needed=True, **border(config))
            self.augmentation = A.Compose([cut, self.augmentation] if self.augmentation else [cut])
        self.ignores = IGNORE in data.meaning.values() or config['skip_broken'] or any(    # masks may hold 255
            getattr(step, 'fill_mask', 0) == IGNORE and step.p > 0 for step in all_steps(self.augmentation))
        self.kept = {}                                                 # {index: validation sample}, kept once read
        self.failed = set()                                            # indices that could not be read the last time
        self.cache = None                                              # resized images, masks, and which are filled in
        if is_training and self.is_resized and config['cache_images'] is True:
            shape = len(self.rows), self.height, self.width, config['in_channels']
            self.cache = shared_zeros(shape, config['image_dtype']), shared_zeros(shape[:3]), shared_zeros(shape[:1])

    def __len__(self):
        return len(self.rows)

    def batch_bytes(self):
        """The most bytes that a batch takes. Validation adds the masks at their original size."""
        count, each = self.config['batch_size'], sample_bytes(self.config)
        if self.is_training:
            return count * each
        pixel = each // math.prod(self.config['image_size'])
        return count * (each + self.largest) if self.is_resized else (pixel + 1) * self.largest

    def name(self, index):
        """Path of an image."""
        return os.fsdecode(self.pairs.images[self.rows[index % len(self)]])

    def read(self, index):
        """Decoded image (H, W, C) and class ids (H, W), at original size. A file that fails is tried three times, but
        once if it failed before."""
        image_path, mask_path = self.name(index), os.fsdecode(self.pairs.masks[self.rows[index]])
        for wait in (0,) if index in self.failed else (0.2, 0.4, 0):   # seconds; a network drive may come back
            try:
                mask = self.coding.encode(read_mask(mask_path, self.config), mask_path)
                image = read_image(image_path, self.config)
                if self.is_mixed:
                    refuse_other_scale(image, image_path, self.config)
                self.failed.discard(index)
                break
            except DataError as error:
                if not wait or ': cannot be read' not in str(error):   # NaN stays NaN
                    self.failed.add(index)
                    raise
                time.sleep(wait)
        if may_be_scaled(mask.shape, image.shape[:2], self.config):
            mask = resize(mask, *image.shape[:2], is_mask=True)
        if image.shape[:2] != mask.shape:                              # a file has changed since it was looked at
            raise DataError(f'{image_path}: is {image.shape[1]} x {image.shape[0]} pixels, its mask {mask_path} '
                            f'{mask.shape[1]} x {mask.shape[0]}')
        return image, mask

    def resized(self, image, mask):
        """Both at image_size."""
        return resize(image, self.height, self.width), resize(mask, self.height, self.width, is_mask=True)

    def read_resized(self, index):
        """As read, at image_size, from the cache where there is one."""
        if self.cache is None:
            return self.resized(*self.read(index))
        images, masks, is_read = self.cache
        if not is_read[index]:
            images[index], masks[index] = self.resized(*self.read(index))
            is_read[index] = 1
        return images[index], masks[index]

    def __getitem__(self, key):
        epoch, draw = key if isinstance(key, tuple) else (0, key)
        index = draw % len(self)
        if index in self.kept:
            return self.kept[index]
        sample, is_known = {'index': index, '_left_out': False}, index in self.failed
        try:
            image, mask = self.read_resized(index) if self.is_training and self.is_resized else self.read(index)
        except DataError as error:
            if not self.config['skip_broken']:
                raise DataError([*error.problems, LEAVE_OUT]) from None
            log.log(logging.DEBUG if is_known else logging.WARNING, 'left out: %s', error.problems[0])     # once
            sample['_left_out'] = True                                 # its pixels are all ignored: they add no loss
            image = np.tile(around(self.config), (self.height, self.width, 1))
            mask = np.full(image.shape[:2], IGNORE, np.uint8)
        if not self.is_training:
            sample['full_mask'] = torch.from_numpy(mask)
            if self.is_resized:
                image, mask = self.resized(image, mask)
        if self.augmentation is not None:
            image, mask = self.augmented(image, mask, epoch, draw)
        image, mask = np.ascontiguousarray(np.atleast_3d(image)), np.ascontiguousarray(mask)
        sample['image'] = torch.from_numpy(image).permute(2, 0, 1)     # no copy: in memory it is channels_last
        sample['mask'] = torch.from_numpy(mask)
        if not self.is_training and self.config['cache_images'] is True and not sample['_left_out']:
            self.kept[index] = sample
        return sample

    def augmented(self, image, mask, epoch, index):
        """An image and its mask as the pipeline changes them in this epoch. DataError if it fails on them."""
        if self.cuts_off and not -0.01 <= image.min() <= image.max() <= 1.01:          # an area mean of 1 is 1.0000001
            raise DataError(f'{self.name(index)}: holds values beyond 0 to 1, and augment={self.config["augment"]} has '
                            'steps that limit float images to 0..1; leave these out')
        seed = seed_of(self.config['seed'], epoch, index)
        draws = np.random.default_rng(seed)
        is_again = index >= len(self)                                  # it comes for its foreground
        if self.aims and (is_again or draws.random() < 1 / 3):         # as in nnU-Net (Isensee et al. 2021)
            image, mask = around_foreground(image, mask, self.height, self.width, draws)
        # set_random_seed would give every transform the same draws
        self.augmentation.set_random_state(np.random.default_rng(seed), random.Random(seed))
        with naming(lambda: f'{self.name(index)}: augment={self.config["augment"]} fails on it in epoch {epoch + 1}'):
            made = self.augmentation(image=image - self.zero, mask=mask)
        return made['image'] + self.zero, made['mask']


def collate(samples):
    """A list of samples -> a batch. 'full_mask' stays a list, as its sizes differ."""
    batch = {key: [sample[key] for sample in samples] for key in samples[0]}
    images = torch.stack([image.movedim(0, -1) for image in batch['image']]).movedim(-1, 1)    # in channels_last
    batch['image'] = images.reshape(images.shape)                      # of grey images the usual strides
    batch['mask'] = torch.stack(batch['mask'])
    if 'full_mask' in batch and torch.utils.data.get_worker_info():
        batch['full_mask'] = OfAWorker(batch['full_mask'])
    return batch | {key: torch.tensor(batch[key]) for key in ('index', '_left_out')}


class OfAWorker(list):
    """Tensors that leave a worker as one, and arrive as a list: each alone would take a file descriptor, of 1,024."""

    def __reduce__(self):
        return taken_apart, (torch.cat([tensor.flatten() for tensor in self]), [tensor.shape for tensor in self])


def taken_apart(joined, shapes):
    """A list of tensors of these shapes, views of the one that holds them all."""
    return [part.view(shape) for part, shape in zip(joined.split([*map(math.prod, shapes)]), shapes)]


def split_evenly(items, most):
    """Nearly equal pieces of at most `most` items, or of 3 where pieces of 2 would leave one over: BatchNorm may refuse
    a single item, so none stands alone unless `most` is 1."""
    count = max(1, math.ceil(len(items) / most))
    if count > 1 and most > 1 and len(items) // count == 1:
        count = len(items) // 2
    return np.array_split(items, count)


def least_shown(rarity, config):
    """How many places of an epoch go to images that show foreground, by their rarity (num_images,), if some do but
    fewer than that, so that these come several times; else 0."""
    least = int(config['oversample_foreground'] * len(rarity))         # of a few images not all of them
    return least if 0 < np.count_nonzero(rarity) < least else 0


class WindowSampler(torch.utils.data.Sampler):
    """Batches of (epoch, index) for one rank, window by window. A window is what one optimizer step sees:
    effective_batch images over all ranks, in a seeded order. A remainder of one image, or of less than half a window
    (rounded down), joins the window before it. Each rank takes its share of a window in micro-batches of at most
    batch_size. Where less than oversample_foreground of the images show foreground, each of these comes once in an
    epoch and the places that are left go to them in proportion to their `rarity` (num_images,): again with num_images
    added to the index, a third time with twice that, and so on."""

    def __init__(self, num_images, config, rank=0, world_size=1, rarity=None):
        self.num_images, self.seed = num_images, config['seed']
        self.rarity, self.least = rarity, 0 if rarity is None else least_shown(rarity, config)
        self.batch_size = config['batch_size']
        self.effective_batch = config['batch_size'] * config['accumulation_steps']
        self.rank, self.world_size = rank, world_size
        self.epoch, self.first_window = 0, 0

    @property
    def num_windows(self):
        """Optimizer steps of an epoch."""
        full, rest = divmod(self.num_images, self.effective_batch)
        return max(1, full + (rest >= max(2, self.effective_batch // 2)))

    def windows(self):
        """Index arrays of the epoch's windows, over all ranks."""
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(self.num_images)
        if self.least:
            shows = self.rarity[order] > 0
            rarity = self.rarity[order[shows]]
            places = 1 + (self.least - len(rarity)) * rarity / rarity.sum()            # one each, the rest by rarity
            turns, steps = places.cumsum(), np.arange(self.least) + rng.random()       # these at even distances
            drawn = np.searchsorted(turns, steps * turns[-1] / self.least)
            times = np.arange(self.least) - np.searchsorted(drawn, drawn)      # how often each has been drawn before
            again = order[shows][drawn] + times * self.num_images
            order = rng.permutation(np.concatenate([again, order[~shows][:self.num_images - self.least]]))
        return np.split(order, [self.effective_batch * i for i in range(1, self.num_windows)])

    def micro_batches(self, window):
        """This rank's share of a window, as a list of index arrays: as many on every rank, for SyncBatchNorm."""
        if self.world_size == 1:
            return split_evenly(window, self.batch_size)
        shares = np.array_split(window, self.world_size)               # the first is the largest
        count = min(math.ceil(len(shares[0]) / self.batch_size), max(1, len(shares[-1])))      # an image in each
        usual = max(1, self.effective_batch // self.world_size)        # a rank's images in all windows but the last
        count = max(count, min(math.ceil(len(shares[0]) / usual), len(shares[-1]) // 2))       # so that memory suffices
        return np.array_split(shares[self.rank], count)

    def __iter__(self):
        for window in self.windows()[self.first_window:]:
            for indices in self.micro_batches(window):
                yield [(self.epoch, int(index)) for index in indices]


def start_worker(_):
    """Workers decode; one thread each, or they fight for the cores."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end_worker)
    with contextlib.suppress(AttributeError, OSError):
        os.setpgid(0, 0)                                               # torchrun signals whole process groups
    names = ['SIGINT', 'SIGTERM', 'SIGUSR1'] if world().size > 1 else ['SIGINT']       # SLURM signals all processes
    for name in names:                                                 # what to do about them the parent decides
        signal.signal(getattr(signal, name, signal.SIGINT), signal.SIG_IGN)        # Windows has no SIGUSR1
    if sys.platform == 'linux' and os.getppid() != multiprocessing.parent_process().pid:
        os._exit(1)                                                    # the parent is dead; torch watches from here on


def end_worker(error, _):
    """In place of a traceback, and of a parent that waits for a batch that is lost, such as where /dev/shm is full."""
    print(f'a data worker cannot hand over its batch: {in_words(error)}', file=sys.stderr, flush=True)
    os._exit(1)


def sample_bytes(config):
    """Bytes of an image and its mask at the size of the network."""
    return math.prod(config['image_size']) * (config['in_channels'] * np.dtype(config['image_dtype']).itemsize + 1)


def batches_that_fit(batch, held=0):
    """How many batches of `batch` bytes fit into shared memory (/dev/shm, by default 64 MiB in a container), beside the
    `held` ones that lie there."""
    if not os.access('/dev/shm', os.W_OK):                             # a sandbox, or not Linux, which needs none
        return 0 if sys.platform == 'linux' else 10**6
    return max(0, int((shutil.disk_usage('/dev/shm').free / (batch * processes_here()) - held) // 1.5))


if hasattr(os, 'register_at_fork'):                                    # not on Windows
    # A thread of gloo that asks for the GIL, as after a collective, holds a lock for that moment: a child forked
    # meanwhile would wait for the lock forever (python/cpython issue 112275, up to 3.11).
    os.register_at_fork(before=lambda: world().size > 1 and time.sleep(0.02),
                        after_in_child=gc.freeze)                      # freeing a GPU tensor would abort it


def build_loader(dataset, config, device, **how):
    """A DataLoader with the workers of the config, forked on Linux so that they share memory. how: for DataLoader."""
    workers = config['num_workers']
    context = 'fork' if workers and sys.platform == 'linux' else None
    is_ours, is_training = isinstance(dataset, SegmentationDataset), getattr(dataset, 'is_training', False)
    pins = device.type == 'cuda'                                       # then no batch stays in shared memory
    held = 0 if pins else 2 * config['accumulation_steps'] if is_training else 2       # at work, and the one before
    room = batches_that_fit(dataset.batch_bytes(), held) if is_ours else 10**6
    if is_ours and not is_training:
        workers = min(workers, room)
    if workers > room:
        warn(f'num_workers={workers}: /dev/shm has room for {room} batches only, and workers that find none die: '
             f'type num_workers={room}, or give the container more (docker run --shm-size=8g)')
    own = torch.Generator().manual_seed(config['seed'])                # else iter() draws from the global generator
    timeout = WORKER_TIMEOUT if hasattr(signal, 'SIGCHLD') else 0      # else a dead worker shows only after the timeout
    extra = {'worker_init_fn': start_worker, 'persistent_workers': True, 'timeout': timeout,
             'prefetch_factor': max(1, min(4, room // workers)), 'multiprocessing_context': context} if workers else {}
    joined = collate if is_ours else as_it_is if isinstance(dataset, Plain) else None
    if joined is as_it_is and pins and not workers:                    # torch's pinning refuses samples that are there
        joined, pins = pinned, False
    return torch.utils.data.DataLoader(dataset, num_workers=workers, pin_memory=pins,
                                       collate_fn=joined, generator=own, **extra, **how)


def as_it_is(batch):
    """Collate nothing: the dataset returns batches."""
    return batch


def pinned(batch):
    """A batch, those of its tensors that are in main memory pinned, or copies to the GPU would wait for the step."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.pin_memory() if x.device.type == 'cpu' else x, batch)


def image_statistics(dataset, config, most=100):
    """[mean, standard deviation] per channel of up to `most` training images, all of the same weight. DataError if some
    are scaled to 0..1 while others, taken as stored, go beyond."""
    chosen = np.random.default_rng(config['seed']).permutation(len(dataset))[:most].tolist()
    images, moments = read_all(dataset, chosen, config['skip_broken']), []
    for (row, _), image in progress(images, len(chosen), 'Mean and spread of the images'):
        if dataset.is_mixed and image.dtype == np.float32 and abs(image).max() > 1.5:
            raise DataError(f'{dataset.name(row)}: goes up to {abs(image).max():g}, as it is stored as float or wide '
                            'integers, while other images of 8 or 16 bits become 0 to 1: save all alike')
        square = np.einsum('hwc,hwc->c', image, image, dtype=np.float64) / math.prod(image.shape[:2])    # no image**2
        moments.append([image.mean((0, 1), dtype=np.float64), square])
    if not moments:
        raise DataError(f'{config["data"]}: none of {len(chosen)} training images can be read')
    mean, square = np.mean(moments, axis=0)
    spread = np.sqrt(np.maximum(square - mean ** 2, 0))
    spread[spread <= 1e-5 * np.maximum(1e-30, abs(mean))] = 1          # a constant band, such as an opaque alpha
    return [[float(f'{value:.6g}') for value in values] for values in (mean, spread)]


# ===== settling: every 'auto' gets its value, with the reason =========================


def settle(config, hardware, data, is_demo):
    """Replace each 'auto' that depends on the data or the machine -> (config, {key: reason}). What was typed stays."""
    config, why = dict(config), {}
    on_cpu = hardware.kind == 'cpu'
    largest, usual_images, fewest_epochs = (256, 8_000, 10) if on_cpu else (512, 32_000, 20)

    def choose(key, value, reason):
        if config[key] == 'auto':
            config[key], why[key] = value, reason

    choose('num_classes', data.coding.num_classes, 'found in the masks')
    class_names(config, config['num_classes'])                         # refuses a wrong number of names
    choose('image_size', *usual_size(config, data, largest))
    choose('mirror', not data.sides, 'no classes that differ by their side' if not data.sides else
           'class {} lies left of class {}: mirrored, each would look like the other'.format(*data.sides))
    is_usual = on_cpu and config['encoder'] == 'auto' and config['architecture'] == 'Unet'
    is_usual &= config['size_policy'] == 'resize' and min(config['image_size']) >= 128 and not config['compile_model']
    choose('progressive_resizing', 0.18 if is_usual else 0.0, 'sooner good on a CPU' if is_usual else 'all at one size')
    choose('encoder', 'tu-resnet10t' if on_cpu else 'resnet34', 'soon good on a CPU' if on_cpu else 'the usual choice')
    if config['architecture'] in HAVE_WIDTHS:
        is_small = on_cpu and config['encoder'] == 'tu-resnet10t'
        last = 16 if config['num_classes'] > 8 else 8                  # not fewer than the classes read from them
        choose('decoder_channels', [128, 64, 32, 16, last] if is_small else [256, 128, 64, 32, 16],
               'about half the usual width, sooner good on a CPU' if is_small else 'the usual width')
    count = len(data.pairs.rows('train'))
    epochs = 10 if is_demo else min(200, max(fewest_epochs, round(usual_images / count)))
    per_epoch = WindowSampler(count, config).num_windows               # optimizer steps of an epoch
    choose('num_epochs', epochs, 'enough for the demo' if is_demo else
           f'{epochs * per_epoch:,} steps; usual are {usual_images:,} images, in {fewest_epochs} to 200 epochs')
    choose('learning_rate', *usual_rate(config, count))
    steps = config['num_epochs'] * per_epoch
    choose('ema_decay', float(f'{min(0.9999, max(0.5, 1 - 20 / steps)):.4g}'),
           f'averages over {"two steps" if steps <= 40 else "5 % of the run" if steps <= 200_000 else "10,000 steps"}')
    size, free = cached_bytes(config, data), free_memory() / processes_here()
    fits = config['size_policy'] == 'resize' and size < free / 4
    choose('num_workers', *usual_workers(config, hardware, fits))
    forks = sys.platform == 'linux' or config['num_workers'] == 0
    reason = f'{size / 2**20:.0f} MiB of {free / 2**30:.1f} GiB free' if forks else 'workers would not share them'
    choose('cache_images', bool(fits and forks),
           reason if config['size_policy'] == 'resize' else 'only resized images are kept')
    if config['cache_images'] is True and config['size_policy'] != 'resize':
        log.warning('cache_images=True keeps the validation images alone: in training only resized images are kept')
    elif config['cache_images'] is True and size > free > 0:
        log.warning('cache_images=True: the images take %.1f GiB, of %.1f GiB free', size / 2**30, free / 2**30)
    return config, why


def usual_size(config, data, limit):
    """The size of the network's images -> ([height, width], reason). ConfigError if a given one is too small to pad."""
    sizes = np.array(list(data.sizes.elements()))                      # (images, 2)
    if config['size_policy'] == 'pad':
        largest = sizes.max(axis=0)
        height, width = (math.ceil(side / 32) * 32 for side in largest)
        if config['image_size'] != 'auto' and any(largest > config['image_size']):
            raise ConfigError(f"image_size={config['image_size']} with size_policy='pad' is smaller than the largest "
                              f"image; type image_size={height}x{width} or size_policy=crop")
        return [height, width], 'the largest image, in steps of 32'
    median = np.median(sizes, axis=0)
    scale = 1 if config['size_policy'] == 'crop' else min(1, limit / median.max())
    size = [min(limit, max(32, round(side * scale / 32) * 32)) for side in median]
    finer = '; size_policy=crop keeps details' if scale < 0.5 else ''
    return size, f'the usual image ({median[1]:.0f} x {median[0]:.0f}), at most {limit}, in steps of 32{finer}'


def cached_bytes(config, data):
    """Bytes of all images as they are kept in memory; for validation their masks at original size are kept too."""
    each, pixels = sample_bytes(config), np.median(list(data.sizes.elements()), axis=0).prod()
    return len(data.pairs.rows('train')) * each + int(len(data.pairs.rows('val')) * (each + 2 * pixels))


def usual_workers(config, hardware, fits):
    """How many processes load the data -> (number, reason). `fits`: all images fit into memory."""
    cores, room = min(8, max(1, num_cores() - 1)), batches_that_fit(config['batch_size'] * sample_bytes(config))
    if hardware.kind == 'cpu':
        return 0, 'the CPU is busy training'
    if hardware.kind == 'mps' and fits and config['cache_images'] in ('auto', True):
        return 0, 'all images fit into memory, which workers would not share'
    if cores <= room:
        return cores, 'one per core of this process but one, at most 8'
    return room, 'no more batches fit into /dev/shm; docker run --shm-size=8g gives more'


def usual_rate(config, images=math.inf):
    """The learning rate that follows the effective batch, at most all training `images` -> (rate, reason). Fewer
    than 8 count as 8: by a smaller rate they learn less."""
    effective, name = config['batch_size'] * config['accumulation_steps'], config['optimizer'].lower()
    effective = min(effective, max(8, images))
    if 'sgd' in name:                                                  # ASGD too
        rate, most, words = 0.02 * effective / 8, 0.1, '0.02 x '
    elif 'adam' in name or name == 'rmsprop':
        rate, most, words = 2e-3 * math.sqrt(effective / 8), 0.01, '2e-3 x sqrt'
    else:                                                              # Adadelta's is 1
        maker = getattr(torch.optim, find_optimizers()[name])
        return float(inspect.signature(maker).parameters['lr'].default), f'the default of torch.optim.{maker.__name__}'
    words += f'({effective} / 8), for an effective batch of {effective}'
    return float(f'{min(rate, most):.2g}'), words if rate <= most else f'{words}; {most} at most'


def image_dtype_of(mode):
    """What an image is stored as, by its mode: 'uint8', 'uint16', or 'float32' for whatever is not scaled to 0..1."""
    eight_bits = {'1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA', 'CMYK', 'YCbCr', 'HSV', 'LAB', 'uint8', 'bool'}
    kind = mode.split()[0]
    return 'uint8' if kind in eight_bits else 'uint16' if kind in {'I;16', 'I;16B', 'RGB48', 'uint16'} else 'float32'


def find_image_dtype(data):
    """What all images are stored as; 'uint8 and uint16' if all become 0 to 1, 'mixed' if only some do."""
    kinds = {*map(image_dtype_of, data.modes)}
    return kinds.pop() if len(kinds) == 1 else 'mixed' if 'float32' in kinds else 'uint8 and uint16'


# ===== model and loss =================================================================


class SegmentationModel(nn.Module):
    """A network with its preprocessing: (B, C, H, W) images as stored -> (B, K, H, W) logits at the same size.

    Normalisation is the first layer and padding to the encoder's stride the second, so that training, prediction and
    export cannot disagree. K is the number of classes, or 1 for two classes.
    """

    def __init__(self, network, config, stride=32, is_own=False):
        super().__init__()
        self.is_own = is_own                                           # given by the user, not named by the config
        self.network, self.config, self.stride, self.exporting = network, dict(config), stride, False
        self.least = None                                              # (H, W) to which smaller images are padded
        self.threshold = 0.5                                           # of the foreground probability, if K is 1
        self.pixels, self.coding = None, None                          # how images are stored; what the masks meant
        self.side = None                                               # of the largest image trained on, in pixels
        for name in ('mean', 'std'):
            value = torch.tensor(config[name], dtype=torch.float32)
            self.register_buffer(name, value.expand(config['in_channels']).reshape(1, -1, 1, 1).clone())

    def forward(self, images):
        if self.config['image_dtype'] != 'uint8' and images.dtype in (torch.uint8, torch.uint16):
            images = images.to(torch.float32) / torch.iinfo(images.dtype).max      # as in convert_pixels
        images = (images.to(torch.float32) - self.mean) / self.std
        is_last = self.config['channels_last'] and images.device.type != 'mps'         # see laid_out
        images = images.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
        height, width = images.shape[-2:]
        sides = (max(height, self.least[0]), max(width, self.least[1])) if self.least else (height, width)
        high, wide = ((side + self.stride - 1) // self.stride * self.stride for side in sides)
        if self.exporting:                                             # one graph has to pad any size
            logits = self.network(pad_by_index(pad_by_index(images, 2, high), 3, wide))
            return logits.index_select(2, torch.arange(height)).index_select(3, torch.arange(width))
        if (high, wide) != (height, width):
            images = F.pad(images, (0, wide - width, 0, high - height))
        logits = self.network(images)
        if torch.is_tensor(logits) and logits.ndim == 4:
            return logits[..., :height, :width]
        if not self.training:
            refuse_other(logits)
        # several outputs, in training alone, are for a loss of the user's
        rows, columns = (lambda length: -(-length * height // high)), (lambda length: -(-length * width // wide))
        return pytree.tree_map(lambda part: part[..., :rows(part.shape[-2]), :columns(part.shape[-1])]
                               if torch.is_tensor(part) and part.ndim == 4 else part, logits)

    def predict(self, image, tta=False):
        """A mask (H, W) uint8 of class ids for a path, a PIL image, an array (H, W[, C]) or a tensor (C, H, W).

        Raises DataError for an image that cannot be read or has another number of channels.
        Leaves the model in eval mode.
        """
        image = as_image(image, self.config)
        return next(decide_stream(self.eval(), [('', image)], tta=tta))[2]

    def probabilities(self, image, tta=False):
        """As predict, but the probability of each class (K, H, W) float32, or (1, H, W) that of the foreground."""
        image = as_image(image, self.config)
        _, _, bands = next(predict_stream(self.eval(), [('', image)], tta=tta))
        return torch.cat([chances(logits) for logits in bands], 1).cpu().numpy()


def refuse_other(logits, channels=None):
    """ConfigError for what is no tensor of logits (B, K, H, W), K being `channels` if given."""
    if not torch.is_tensor(logits) or logits.ndim != 4 or not logits.is_floating_point():
        what = f'tensor {tuple(logits.shape)}, {logits.dtype}' if torch.is_tensor(logits) else type(logits).__name__
        raise ConfigError(f'model: gives a {what}; wanted are the logits alone, a tensor (B, K, H, W): give a module '
                          "that returns its part, such as network(images)['out'] (in training it may give all parts, "
                          'to a loss_fn of your own)')
    if channels and logits.shape[1] != channels:
        raise ConfigError(f'model: gives {logits.shape[1]} channels in training; wanted: {channels}, as in eval mode '
                          '(others are for a loss_fn of your own)')


def ends_in_chances(logits):
    """Whether logits are the result of a sigmoid or softmax, perhaps resized, cropped or clamped. False without
    gradients, whose graph tells."""
    node, passed = logits.grad_fn, ('Alias', 'Slice', 'Upsample', 'Clamp', 'View', 'Permute', 'Squeeze', 'Unsqueeze',
                                    'ToCopy')
    while type(node).__name__.startswith(passed):
        node = node.next_functions[0][0]
    return type(node).__name__.startswith(('Sigmoid', 'Softmax'))


def pad_by_index(images, axis, padded):
    """F.pad with zeros at the end of an axis, in operations that torch.export does not specialise to 'no padding'."""
    length, index = images.shape[axis], torch.arange(padded)
    shape = [-1 if dim == axis else 1 for dim in range(4)]
    return images.index_select(axis, index.clamp(max=length - 1)) * (index < length).view(shape)


HAVE_WIDTHS = ('Unet', 'UnetPlusPlus', 'MAnet')    # whose decoder_channels can be chosen


def build_network(config):
    """The network that the config names, untrained or with encoder weights. Raises ConfigError."""
    name, encoder, weights = config['architecture'], config['encoder'], config['encoder_weights']
    classes = 1 if config['num_classes'] == 2 else config['num_classes']
    extra = {'decoder_channels': config['decoder_channels']} if name in HAVE_WIDTHS else {}
    advice = f'; encoder_weights={weights!r} may be out of reach or damaged: encoder_weights=None starts from scratch'
    if weights:
        log.info('encoder weights: %s of %s (downloaded where they are not yet kept)', weights, encoder)
    try:
        has_one = weights and encoder.startswith('tu-')                # timm has one set of weights for each name
        with asking_hub() if weights else contextlib.nullcontext():
            return getattr(smp, name)(encoder_name=encoder, in_channels=config['in_channels'], classes=classes,
                                      encoder_weights=has_one or weights, **extra)
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError,
            AssertionError, ImportError) as error:                     # timm asserts; a proxy may need a package
        told = in_words(error) + (advice if weights else '')
        raise ConfigError(f'architecture={name!r} with encoder={encoder!r}: {told}') from None


@contextlib.contextmanager
def asking_hub():
    """Use Hugging Face's cache alone if its server cannot be reached: the client would retry for half a minute."""
    from huggingface_hub import constants                              # comes with smp
    hub, is_offline = urllib.parse.urlsplit(constants.ENDPOINT), constants.HF_HUB_OFFLINE
    if not is_offline and not {hub.scheme, 'all'} & urllib.request.getproxies().keys():
        try:
            port = hub.port or (80 if hub.scheme == 'http' else 443)
            socket.create_connection((hub.hostname, port), timeout=3).close()
        except OSError:
            is_offline = True
    try:
        with unittest.mock.patch.object(constants, 'HF_HUB_OFFLINE', is_offline):  # a notebook may ask again later
            yield
    except Exception as error:
        if not type(error).__module__.startswith(('httpx', 'httpcore')):
            raise
        raise OSError(in_words(error)) from error                      # a proxy that refuses, a broken download


def build_model(config, own=None):
    """The config's network, or one of your own, with its preprocessing, on the CPU."""
    network = build_network(config) if own is None else own.cpu()
    convert_weights(network)
    stride = max(32, getattr(getattr(network, 'encoder', None), 'output_stride', 32))
    model = SegmentationModel(network, config, stride, is_own=own is not None)
    refuse_lazy(network)
    if own is None:
        fold_upsampling(network)
    keep_float32(network, config['keep_float32'])
    if config['activation_checkpointing']:
        for module in checkpointable(model):
            change_forward(module, Checkpointed)
    if own is None and config['size_policy'] != 'resize':
        model.least = least_size(model.eval())
        model.train()
    return model


def convert_weights(network):
    """Make weights of another precision float32, with a warning."""
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in network.parameters()):
        warn('the network came with weights that are not float32: they are now, which amp_dtype works on')
        network.float()


def least_size(model):
    """(H, W) to which smaller images have to be padded; None if the network takes 32 pixels, as nearly all do."""
    size = model.config['image_size']
    for side in (32, 64, 128):                                         # PAN wants 128, also of the crops
        if side <= max(32, min(size)) and takes(model, torch.zeros(1, model.config['in_channels'], side, side)):
            return None if side == 32 else (side, side)
    return size                                                        # Swin and other transformers take one size


def refuse_lazy(network):
    """UserError where weights have no size yet (nn.LazyConv2d)."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
        raise UserError('model: has lazy layers, whose weights have no size yet: run one batch through it first')


@torch.no_grad()
def begin_at_share(model, data):
    """Let a fresh network predict rare classes, all but the most frequent one, as often as they occur if each is below
    a tenth of the pixels, but no less than least_share, by the biases of its last convolution: to learn that took
    epochs. Not if more than a tenth of the images (rounded up) have no foreground, unless the others come more often
    for that: a network that began so learnt to find none."""
    bias = last_bias(model)
    rarity = data.rarity[data.pairs.rows('train')]
    do_most_show = np.count_nonzero(rarity) >= int(0.9 * len(rarity)) or least_shown(rarity, model.config)
    most = int(np.argmax(data.shares))
    is_rare = data.shares[most] > 0.5 and np.delete(data.shares, most).max() < 0.1 and do_most_show
    if is_rare and bias is not None and len(bias) <= len(data.shares):
        shares = data.shares.clip(least_share(len(data.shares)))
        shares[most] += 1 - shares.sum()
        bias.copy_(torch.from_numpy(np.log(shares / shares[0]))[-len(bias):])          # two classes have one


@torch.no_grad()
def match_shares(state, batches):
    """Let a network that goes on from another task predict each class as often as these batches show it, by the biases
    of its last convolution: from a network of cracks (2 % of the pixels) membranes (78 %) were not learnt in eight
    epochs."""
    before, logits, truth = Snapshot(state.parts), [], []              # in train mode, as what is learnt first

    def watch(model, batch):
        found, mask = model(batch['image'])[..., ::4, ::4], batch['mask'][:, ::4, ::4]
        found = F.pad(found, (0, 0, 0, 0, int(found.shape[1] == 1), 0)).movedim(1, -1)     # logit 0 of the background
        logits.append(found[mask != IGNORE])
        truth.append(mask[mask != IGNORE].long())
        return found.new_zeros(len(found))

    for batch in batches:
        in_halves(functools.partial(run_loss, watch, state.model, 'float32'), batch)       # which all layers know
    before.put_back()
    shift = from_first(lambda: shift_to_shares(torch.cat(logits), torch.cat(truth)))
    if shift:
        bias = last_bias(state.model)
        bias += bias.new_tensor(shift[-len(bias):])
        state.average = state.average and state.parts.copy()           # both are what training begins with


def shift_to_shares(logits, truth):
    """(N, K) logits, (N,) class ids -> [K numbers] that, added to the logits, give each class the mean probability of
    its share (Saerens et al. 2002), no less than least_share; what is not shown keeps its own. [] where none is
    predicted over three times or under a third as often as it is shown: networks of the same task were off by up to
    1.9. Of three classes or more those below least_share say nothing: such a network may not know the rarest of 11."""
    mean = lambda shift: (logits + shift).softmax(1).mean(0).clamp_min(1e-9)
    shown, found, shift = torch.bincount(truth, minlength=logits.shape[1]) / len(truth), mean(0), 0
    least = least_share(len(shown))                                    # found on less, nothing is too frequent
    is_told = (shown > (least if len(shown) > 2 else 0)) & ((shown > found) | (found > least))
    most = max((shown / found)[is_told].log().abs().tolist(), default=0)
    if most <= math.log(3):
        return []
    log.info('last layer: its biases are set to the shares of the classes here; it had one %.3g times too often or too '
             'rarely', math.exp(most))
    wanted = torch.where(shown > 0, shown.clamp_min(least), found)
    for _ in range(100):
        shift = shift + (wanted / mean(shift)).log()
    return (shift - shift[0]).tolist()


def least_share(count):
    """The least share of the pixels with which any of `count` classes begins: Lin et al.'s 0.01 (2017, section 4.1), of
    more than ten an equal part of a tenth. With less one of three seeds stuck for long."""
    return min(0.01, 0.1 / (count - 1))


def last_bias(model):
    """The biases of a network's last convolution; None where it, or a head of one's own, has none."""
    head = getattr(model.network, 'segmentation_head', nn.Identity())
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Conv2d)]
    return layers[-1].bias if layers else None


def laid_out(model, config, device):
    """Put a model into channels_last if the config asks for it -> the model.

    On a CPU norms whose channels leave vector registers half empty stay in NCHW: the backward pass of 8 channels took
    43 ms instead of 2 (8 x 256 x 256 pixels, AVX512, torch 2.14). On an Apple GPU nothing is in channels_last, even
    where an encoder switches to it by itself: gradients of BatchNorm were wrong there by orders of magnitude, and
    pooling crashed (pytorch issues 175189 and 175190, fixed in 2026).
    """
    BatchNorm, on_apple = nn.modules.batchnorm._BatchNorm, device.type == 'mps'
    lanes = 16 if torch.backends.cpu.get_cpu_capability() == 'AVX512' else 8       # float32 values in a register
    for module in model.modules():
        is_narrow = device.type == 'cpu' and isinstance(module, BatchNorm) and module.num_features % lanes
        if is_narrow or on_apple and isinstance(module, (BatchNorm, nn.MaxPool2d, nn.AvgPool2d)):
            if to_nchw not in module._forward_pre_hooks.values():      # a notebook may train one network twice
                module.register_forward_pre_hook(to_nchw)
        elif on_apple and isinstance(module, nn.AdaptiveAvgPool2d):
            change_forward(module, PooledByProduct)
        elif device.type == 'cpu' and type(module) in (nn.Conv2d, mixed(Float32, nn.Conv2d)) \
                and module.in_channels < 16 and max(module.stride) > math.prod(module.kernel_size) == 1 \
                and module.padding in ((0, 0), 'valid'):
            change_forward(module, ConvolvesEveryNth)
    to_last = config['channels_last'] and not on_apple
    layout = torch.channels_last if to_last else torch.contiguous_format       # back: a notebook gives it once more
    for tensor in itertools.chain(model.parameters(), model.buffers()):        # model.to() refuses five, of a Conv3d
        if tensor.ndim == 4 and (to_last or tensor.is_contiguous(memory_format=torch.channels_last)):
            tensor.data = tensor.data.contiguous(memory_format=layout)
    return model


def to_nchw(_, maps):
    """Forward pre-hook: the module gets its maps in NCHW. Code compiled for a CPU has kernels that do not need it."""
    if not torch.compiler.is_compiling() or maps[0].device.type == 'mps':
        return tuple(each.contiguous() if torch.is_tensor(each) else each for each in maps)


class ConvolvesEveryNth:
    """Mixin: a 1x1 convolution with a stride reads every n-th pixel. With few channels in channels_last, torch (2.6 to
    2.15) writes beyond its memory in the backward pass of that on a CPU: a heap that is corrupted ends the process."""

    def _conv_forward(self, maps, weight, bias):                       # what forward calls, also that of Float32
        high, wide = self.stride
        return F.conv2d(maps[..., ::high, ::wide], weight, bias, groups=self.groups)


class PooledByProduct:
    """Mixin: adaptive pooling of any size, which Apple GPUs have for divisors only (pytorch issue 96056)."""

    def forward(self, maps):
        return pool_by_product(maps.contiguous(), self.output_size)


def try_size(model, sizes=()):
    """Run a blank image through the network: of image_size, of half of it for progressive_resizing and, where nothing
    is resized, of the smallest of `sizes` [(H, W), ...], as validation sees it. Raises ConfigError for a size that the
    network cannot take, or where one of your own gives something other than logits. One of your own that cannot take a
    size padded to the stride is given it as it is. Leaves it in eval mode."""
    config, size, classes = model.config, model.config['image_size'], model.config['num_classes']
    tried = {'': size}                                                 # what else the user could type -> size
    if config['progressive_resizing'] not in ('auto', 0):
        tried['; or progressive_resizing=0'] = [side // 2 for side in size]
    if sizes and config['size_policy'] != 'resize':
        tried['; or size_policy=resize'] = min((tuple(map(min, one, size)) for one in sizes), key=math.prod)
    for other, (height, width) in tried.items():
        shape, wanted = (1, config['in_channels'], height, width), (1, 1 if classes == 2 else classes, height, width)
        try:
            images = torch.zeros(shape, dtype=getattr(torch, config['image_dtype']), device=model.mean.device)
            # without gradients no trace of a sigmoid is kept; with them more memory is taken than checkpoints take
            is_saving = config['activation_checkpointing'] and is_of_smp(model)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_saving):
                logits = model.eval()(images)
            refuse_other(logits)
            if logits.shape != wanted:
                binary = ', one channel for the foreground (of two: x[:, 1:] - x[:, :1])' if classes == 2 else ''
                small = '; enlarge them by F.interpolate' * (logits.shape[:2] == wanted[:2])
                raise ConfigError(f'model: gives {tuple(logits.shape)} for images {shape}; {classes} classes want '
                                  f'logits {wanted}{binary}{small}')
            if ends_in_chances(logits):
                raise ConfigError('model: ends in a sigmoid or softmax; wanted are the logits before it')
            if model.is_own:                                           # of MONAI's DynUNet, which keeps its outputs,
                with torch.no_grad():                                  # no copy could be made while they have a graph
                    model(images)
        except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, LookupError) as error:
            if is_out_of_memory(error):
                raise OneTooLarge(TOO_LARGE) from None
            is_padded = height % model.stride or width % model.stride
            if model.is_own and is_padded and config['size_policy'] == 'resize':       # it may want just this size
                model.stride = 1
                return try_size(model, sizes)
            wish = re.findall(r'match model \((\d+)\)', str(error))    # of timm's networks
            wish += [only_size(config['encoder'])] if is_of_smp(model) else []
            larger = [f'{size[0] * 2}x{size[1] * 2}', *filter(None, wish)][-1]
            advice = f'type another image_size, such as {larger}{other}'
            advice = advice if is_of_smp(model) else f'if that is the size {advice}'
            if 'view size' in str(error) and config['channels_last']:
                advice = 'type channels_last=False, or write .reshape in place of its .view'
            for count, given in re.findall(r'to have (\d+) channels, but got (\d+)', str(error)):
                advice = f'type in_channels={count}' if int(given) == config['in_channels'] else advice
            raise ConfigError(f'{network_name(model)}: cannot take normalised float32 images {shape} '
                              f'({in_words(error)}); {advice}') from None


def only_size(encoder):
    """The one size of images, in pixels, that an encoder of timm takes; None if it takes several."""
    known = timm.models.get_pretrained_cfg(encoder.removeprefix('tu-')) if encoder.startswith('tu-') else None
    return known.input_size[-1] if known and known.fixed_input_size else None


def is_of_smp(model):
    """Whether a SegmentationModel holds a network of smp: not one of the user's, nor of an edited build_network."""
    return isinstance(model, SegmentationModel) and isinstance(model.network, smp.base.SegmentationModel) \
        and not model.is_own


def network_name(model):
    """What messages call a network."""
    if is_of_smp(model):
        return '{architecture} with {encoder}'.format(**model.config)
    return f'your own, {type(model.network if isinstance(model, SegmentationModel) else model).__name__}'


def change_forward(module, mixin):
    """Give one module a mixin's forward: by class, so that copies, pickles and state_dict keys stay as they are."""
    if not isinstance(module, mixin):                                  # a notebook may train one network twice
        module.__class__ = mixed(mixin, type(module))
    return module


@functools.cache
def mixed(mixin, kind):
    """`kind` with the forward of a mixin. The class exists in no module, so its objects tell pickle how to make it."""
    remake = lambda module, _: (change_forward, (kind.__new__(kind), mixin), vars(module))
    return type(mixin.__name__ + kind.__name__, (mixin, kind), {'__reduce_ex__': remake})


def fold_upsampling(network, folds=True):
    """Let the decoder blocks of smp.Unet convolve before they enlarge, where that pays: the same function of the same
    weights in fewer operations, and without the enlarged maps in memory. False turns it off, for export."""
    ones = torch.eye(9).view(9, 1, 3, 3).flip(2, 3)                    # nine kernels with a single 1 each
    sums = 4 * F.avg_pool2d(F.pad(ones, (1, 1, 1, 1)), 2, 1).view(9, 16)           # of weights: the 4x4 kernel
    for module in network.modules():
        # of an edited build_network it may enlarge otherwise, or have something before its first convolution
        if (isinstance(module, Folded) or type(module) is smp.decoders.unet.decoder.UnetDecoderBlock) \
                and next(module.attention1.parameters(), None) is None \
                and getattr(module, 'interpolation_mode', 'nearest') == 'nearest' \
                and re.search(r'=\(3, 3\), stride=\(1, 1\), padding=\(1, 1\)(, bias=False)?\)$', str(module.conv1[0])):
            change_forward(module, Folded).folds = folds
            conv = change_forward(module.conv1[0], ConvolvesDoubled)
            conv.register_buffer('sums', sums.to(conv.weight), persistent=False)


class Folded:
    """Mixin: a decoder block that hands its first convolution the pair (map, skip connection), instead of doubling the
    map and concatenating the two. Maps of a few pixels gain nothing."""

    def forward(self, feature_map, target_height, target_width, skip_connection=None):
        height, width = feature_map.shape[-2:]
        device, is_doubled = feature_map.device.type, (target_height, target_width) == (2 * height, 2 * width)
        is_meant = self.folds and folding_pays(device, torch.is_autocast_enabled('cuda'))
        if not (is_meant and is_doubled and height * width >= 64):
            return super().forward(feature_map, target_height, target_width, skip_connection)
        return self.attention2(self.conv2(self.conv1((feature_map, skip_connection))))


def folding_pays(device, is_autocast):
    """Where folding was measured to be faster: on CPUs, and in 16 bits on a GPU (tests/benchmarks/gpu.py), where
    autocast makes maps float32 before it doubles them. Elsewhere it was not, or not measured."""
    return device == 'cpu' or device == 'cuda' and not torch.version.hip and is_autocast       # AMD's are cuda too


class ConvolvesDoubled:
    """Mixin: a 3x3 convolution that also takes a pair, maps (B, C, h, w) and a skip connection (B, D, 2h, 2w) or None,
    as if the maps were doubled and the skip connection concatenated.

    Doubling repeats each pixel four times. A 3x3 convolution of the result equals a transposed convolution of the small
    map, whose 4x4 kernel holds sums of the 3x3 weights: 16 products per pixel of it instead of 36.
    """

    def forward(self, maps):
        if torch.is_tensor(maps):
            return super().forward(maps)
        small, skip = maps
        weight, skip_weight = self.weight.split([small.shape[1], self.in_channels - small.shape[1]], 1)
        with torch.autocast(weight.device.type, enabled=False):        # a product is faster than pooling all weights
            kernel = (weight.transpose(0, 1).reshape(-1, 9) @ self.sums).view(small.shape[1], -1, 4, 4)
        made = F.conv_transpose2d(small, kernel, self.bias, stride=2, padding=1)
        return made + F.conv2d(skip, skip_weight, padding=1) if skip_weight.numel() else made


def keep_float32(network, name):
    """Keep a submodule (none if name is None) out of autocast, and all in it: a ModuleList itself is never called."""
    modules = dict(network.named_modules())
    if name and name not in modules:
        raise ConfigError(f'keep_float32={name!r}: the network has no such module{did_you_mean(name, modules) or ";"} '
                          f'at the top it has {", ".join(dict(network.named_children()))}; for all type use_amp=False')
    for module in modules.values():                                    # of an earlier training: see change_forward
        while isinstance(module, (Float32, Checkpointed)):
            module.__class__ = type(module).__mro__[2]
    for module in modules[name].modules() if name else ():
        change_forward(module, Float32)


class Float32:
    """Mixin: runs outside autocast, on float32 inputs."""

    def forward(self, *inputs, **named):
        inputs, named = to_float32((inputs, named))
        tensors = [x for x in [*pytree.tree_leaves((inputs, named)), *self.parameters()] if torch.is_tensor(x)]
        device = tensors[0].device.type if tensors else 'cpu'          # torch 2.6 cannot export next()
        if not torch.is_autocast_enabled(device):                      # torch.export cannot write what follows
            return super().forward(*inputs, **named)
        with torch.autocast(device, enabled=False):
            return super().forward(*inputs, **named)


class Checkpointed:
    """Mixin: keeps only its inputs and computes the rest again in the backward pass (Chen et al. 2016)."""

    def forward(self, *inputs, **named):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*inputs, **named)
        given = [(inputs, named)]                                      # the first run may write into the caller's lists
        apple = torch.mps if torch.backends.mps.is_available() else None       # torch repeats no draws of its GPU
        drawn = apple and apple.get_rng_state()

        def run(*kept, **kept_named):
            if given:
                args, words = given.pop()
                return super(Checkpointed, self).forward(*args, **words)
            before = [buffer.clone() for buffer in self.buffers()]     # BatchNorm sees its batch a second time
            now = apple and apple.get_rng_state()
            try:
                if apple:
                    apple.set_rng_state(drawn)
                return super(Checkpointed, self).forward(*same_tensors(kept), **same_tensors(kept_named))
            finally:
                if apple:
                    apple.set_rng_state(now)
                for buffer, value in zip(self.buffers(), before):
                    buffer.data.copy_(value)                           # .data, or autograd sees what it saved change

        return torch.utils.checkpoint.checkpoint(run, *same_tensors(inputs), use_reentrant=False, **same_tensors(named))


def same_tensors(inputs):
    """The same tensors in lists and dicts of their own: HRNet replaces what the list that it was given holds, DenseNet
    appends to the one that it gave, and the second run would start from other maps than the first."""
    return pytree.tree_map(lambda leaf: leaf, inputs)


def checkpointable(model):
    """The blocks worth recomputing: the largest modules that a forward pass really calls and that hold a quarter of
    the layers at most. (Some encoders call slices of their stages, and never the stages themselves.)"""
    called, network = set(), model.network
    with nn.modules.module.register_module_forward_hook(lambda module, *_: called.add(module)):
        if not takes(model.eval(), torch.zeros(1, model.config['in_channels'], 256, 256)):         # fixed size
            try_size(model)
    model.train()
    layers = lambda module: sum(not list(m.children()) for m in module.modules())
    chosen, covered = [], set()
    for module in network.modules():                                   # parents come before their children
        if module in called and module not in covered and 2 < layers(module) <= layers(network) / 4:
            chosen.append(module)
            covered |= set(module.modules())
    return chosen


class SegmentationLoss:
    """loss_fn(model, batch) -> (losses (B,), confusion matrix (K, K)).

    One value per image, so that a batch may be split in any way: cross-entropy (or focal, Lin et al. 2017, gamma 2)
    averaged over the pixels that count, plus 1 - Dice of the image (Milletari et al. 2016, denominator without
    squares, smoothed by 1). For more than two classes the latter is the mean of 1 - Dice - 0.3 log(Dice) over the
    classes in the image: where a rare class is hardly found the gradient of Dice vanishes, that of its logarithm (Wong
    et al. 2018) does not. (Not for two classes: where many images have no foreground, a network learnt to find none.)
    An image that is ignored altogether has the loss 0. The price: no Dice over a whole batch.
    """

    def __init__(self, config, class_weights=None):
        self.kind, self.num_classes = config['loss'], config['num_classes']
        self.class_weights = class_weights
        self.tiles = None if config['size_policy'] == 'resize' else (config['image_size'], config['batch_size'])
        self.reach = None                                              # found in each validation, see find_reach

    def __call__(self, model, batch):
        images, target = batch['image'], batch['mask'].long()
        in_tiles = self.tiles and 'full_mask' in batch
        if in_tiles and self.reach is None:
            self.reach = find_reach(model, images, self.tiles[0], getattr(model, 'config', None))
        logits = tiled_logits(model, images, *self.tiles, self.reach) if in_tiles else model(images)
        refuse_other(logits, 1 if self.num_classes == 2 else self.num_classes)
        losses = self.losses(logits, target)
        with torch.no_grad():
            if 'full_mask' in batch:
                counts = sum(confusion_matrix(decide(logit, mask.shape), mask, self.num_classes)
                             for logit, mask in zip(logits, batch['full_mask']))
            else:
                counts = confusion_matrix(classify(logits), target, self.num_classes)
        return losses, counts

    def losses(self, logits, target):
        """(B, K, H, W) float32 logits, (B, H, W) class ids with 255 ignored -> (B,)."""
        binary, kept = logits.shape[1] == 1, target != IGNORE
        valid, truth, total = kept.float(), target * kept, 0
        if self.kind != 'dice':
            entropy = F.cross_entropy(logits, truth, reduction='none') if not binary else \
                F.binary_cross_entropy_with_logits(logits[:, 0], truth.float(), reduction='none')
            if 'focal' in self.kind:
                entropy = (1 - torch.exp(-entropy)) ** 2 * entropy
            if self.class_weights is not None:
                self.class_weights = self.class_weights.to(entropy.device)     # kept: each copy would wait
                entropy = entropy * self.class_weights[truth.long()]
            total = total + (entropy * valid).sum((1, 2)) / valid.sum((1, 2)).clamp_min(1)
        if 'dice' in self.kind:
            probability = logits.sigmoid() if binary else logits.softmax(1)
            classes = torch.arange(logits.shape[1], device=truth.device).view(1, -1, 1, 1) + int(binary)
            one_hot = (truth[:, None] == classes) * valid[:, None]
            overlap, present = (probability * one_hot).sum((2, 3)), one_hot.sum((2, 3))
            dice = (2 * overlap + 1) / ((probability * valid[:, None]).sum((2, 3)) + present + 1)
            in_image = torch.ones_like(present) if binary else (present > 0).float()
            missed = 1 - dice if binary else 1 - dice - 0.3 * dice.log()
            total = total + (missed * in_image).sum(1) / in_image.sum(1).clamp_min(1)
        return total


def wished_weights(config, data=None):
    """The config's class_weights: factors, 'auto' or None. 'multiclass' is one of the latter two: None where images of
    rare classes come several times, as both were too much."""
    if config['class_weights'] != 'multiclass':
        return config['class_weights']
    is_sparse = data is not None and least_shown(data.rarity[data.pairs.rows('train')], config) > 0
    return 'auto' if config['num_classes'] > 2 and config['loss'] == 'ce+dice' and not is_sparse else None


def build_class_weights(config, data):
    """The factors as a (K,) tensor; 'auto': 1 / sqrt(share), its mean over pixels made 1, at most 20."""
    wish = wished_weights(config, data)
    if wish is None:
        return None
    if config['loss'] == 'dice':
        warn('class_weights weigh the cross-entropy: no effect with loss=dice; type loss=ce+dice')
    if wish == 'auto':
        wish = 1 / np.sqrt(np.maximum(data.shares, 1e-6))
        wish = np.minimum(wish / (wish * data.shares).sum(), 20)
    elif len(wish) != config['num_classes']:
        raise ConfigError(f'class_weights={wish}: {counted(len(wish), "factor")} for {config["num_classes"]} classes')
    return torch.tensor(wish, dtype=torch.float32)


def tiled_logits(model, images, tile, batch_size=1, reach=None):
    """(1, C, H, W) -> (1, K, H, W) logits from overlapping tiles."""
    rows = lambda first, last: images[..., first:last, :]
    return torch.cat(list(tiled_bands(model, rows, images.shape[-2:], tile, batch_size, reach)), 1)[None]


def tiled_bands(model, rows, size, tile, batch_size=1, reach=None, overlap=0.25):
    """Logits of an image of any size, yielded as bands (K, h, W) from top to bottom: memory follows the width alone.

    rows(first, last) gives rows of the image as (1, C, h, W). Tiles overlap and are blended with weights that fall
    towards their edges, so that no seam shows. `reach`: from find_reach, measured here if None.
    """
    tops, lefts = (tile_offsets(length, side, overlap) for length, side in zip(size, tile))
    reach = find_reach(model, rows(0, 1), tile) if reach is None else reach
    down, across = (tile_weights(begins, side, overlap, reach) for begins, side in zip((tops, lefts), tile))
    above = None
    for number, (top, following) in enumerate(zip(tops, [*tops[1:], size[0]])):
        strip = rows(top, min(top + tile[0], size[0]))
        down, across = down.to(strip.device), across.to(strip.device)  # copied once: each copy would wait
        *others, last = (strip[..., left:left + tile[1]] for left in lefts)        # the last may be narrower
        groups = [*(torch.cat(others).split(batch_size) if others else ()), last]
        outputs = (output for group in groups for part in in_halves(model, group) for output in part)
        logits = None
        for left, beside, output in zip(lefts, across, outputs):       # a group at a time is in memory
            logits = output.new_zeros(len(output), *strip.shape[-2:]) if logits is None else logits
            logits[..., left:left + tile[1]] += output * beside[:output.shape[-1]]
        logits *= down[number, :strip.shape[-2], None]
        if top:                                                        # the share of the tiles above in these rows
            logits[:, :above.shape[1]] += above
        above = logits[:, following - top:]
        yield logits[:, :following - top]


def tile_offsets(length, side, overlap, stride=32):
    """Where tiles that cover a length begin: multiples of the stride, so on the network's grid; the last may stick out.

    Tiles so small that the step between them is less than a stride lie off the grid.
    """
    step, rest = int(side * (1 - overlap)), max(length - side, 0)
    unit = min(step, stride)
    return [*range(0, rest, step - step % unit), math.ceil(rest / unit) * unit]


@torch.no_grad()
def find_reach(model, images, tile, config=None):
    """How many pixels deep the logits of a tile (h, w) depend on what lies around it: half the receptive field.

    Measured: the deepest logit that changes when the pixels of the rim do; the longer side where that is in the middle,
    as it is then unknown. The tile is noise of the type of `images` (1, C, ...); floats have the config's mean and std.
    """
    noise = np.random.default_rng(0).integers(0, 256, (1, images.shape[1], *tile))
    other = 255 - noise
    if images.is_floating_point():
        mean, std = (np.array(config[key])[:, None, None] if config else 0.5 for key in ('mean', 'std'))
        noise, other = (mean + std * (pixels / 127.5 - 1) for pixels in (noise, other))
    other[..., 1:-1, 1:-1] = noise[..., 1:-1, 1:-1]
    first, second = (model(torch.from_numpy(pixels).to(images)) for pixels in (noise, other))
    depths = [np.minimum(at, length - 1 - at) for length, at in zip(tile, map(np.arange, tile))]
    deepest = int((np.minimum(depths[0][:, None], depths[1]) * (first != second).any(1)[0].cpu().numpy()).max())
    return deepest if 2 * deepest + 2 < min(tile) else max(tile)


def tile_weights(begins, side, overlap, reach):
    """(tiles, side) weights of tiles along one axis, which add up to 1 in each pixel: next to nothing at the rim,
    rising evenly within the overlap.

    The outermost `reach` pixels lack part of their surroundings. They get no weight where the overlap is wide enough
    (over 2 x reach) for others to stand in: tiles then give the same as the whole image. Where it is not they cannot,
    and the weights rise over the middle half of the overlap.
    """
    wide = int(overlap * side)
    rim = reach if 2 * reach < wide else wide // 4
    distance = torch.minimum(torch.arange(1, side + 1, device='cpu'), torch.arange(side, 0, -1, device='cpu'))
    ramp, total = ((distance - rim) / (wide - 2 * rim)).clamp(1e-8, 1), torch.zeros(begins[-1] + side, device='cpu')
    for begin in begins:
        total[begin:begin + side] += ramp
    return torch.stack([ramp / total[begin:begin + side] for begin in begins])


def enlarged_bands(logits, size, most=2**26):
    """(K, h, w) logits -> bands (K, rows, W) of them at the wanted size, bilinear, of `most` numbers (256 MB) at most.
    Logits that have that size already are one band, unchanged."""
    height, width = size
    rows = max(1, most // (len(logits) * width))
    if tuple(logits.shape[-2:]) == (height, width):
        yield logits
    elif rows >= height:                                               # in channels_last it takes twice as long
        yield F.interpolate(logits.contiguous()[None], (height, width), mode='bilinear', align_corners=False)[0]
    else:
        logits = logits.contiguous()
        wide = F.interpolate(logits[None], (logits.shape[-2], width), mode='bilinear', align_corners=False)[0]
        centres = (torch.arange(height, device=logits.device) + 0.5) * logits.shape[-2] / height - 0.5
        for centre in centres.clamp(0, logits.shape[-2] - 1).split(rows):
            above, part = centre.long(), centre.frac()[:, None]
            yield wide[:, above] * (1 - part) + wide[:, (above + 1).clamp(max=logits.shape[-2] - 1)] * part


def classify(logits, threshold=0.5):
    """([B,] K, h, w) logits -> ([B,] h, w) uint8 class ids. The one place where scores become a mask."""
    if logits.shape[-3] == 1:
        return (logits.squeeze(-3) > math.log(threshold / (1 - threshold))).to(torch.uint8)
    return logits.max(-3).indices.to(torch.uint8)                      # argmax takes five times as long on a CPU


def chances(logits):
    """(K, h, w) logits -> the probability of each class, (K, h, w); for K = 1 that of the foreground."""
    return logits.sigmoid() if len(logits) == 1 else logits.softmax(0)


def decide(logits, size, threshold=0.5):
    """(K, h, w) logits -> (H, W) uint8 class ids at the wanted size."""
    return torch.cat([classify(band, threshold) for band in enlarged_bands(logits, size)])


# ===== metrics ========================================================================


def confusion_matrix(predicted, target, num_classes, copies=None):
    """Class ids of equal shape, 255 in target ignored -> (K, K) counts, rows truth, columns prediction. No sync.

    A GPU's threads would queue for a few counters, so there many `copies` of them are counted side by side.
    """
    size = num_classes ** 2
    copies = copies or (1 if target.device.type == 'cpu' else 2 ** int(math.log2(max(1, 2**14 // size))))
    counts = torch.zeros(copies * size, dtype=torch.int32, device=target.device)
    for ids, truth in zip(predicted.flatten().split(2**23), target.flatten().split(2**23)):    # 25 bytes for a pixel
        keep = truth != IGNORE
        cells = truth.long() * keep * num_classes + ids.long()
        if copies > 1:
            cells += torch.arange(len(cells), device=cells.device) % copies * size
        counts.index_add_(0, cells, keep.int())                        # Apple GPUs cannot in int64
    return counts.view(copies, num_classes, num_classes).sum(0, dtype=torch.int32).long()


def compute_metrics(counts):
    """(K, K) counts of a data set or of one image -> IoU, Dice, precision and recall, per class and as one score.

    All pixels of all images together, not a mean of batches. What cannot occur, 0 / 0, is NaN (a class neither in
    truth nor in prediction) and left out of the mean. For two classes the score is the foreground's. 'constant_iou' is
    the score of calling every pixel foreground, or of the most frequent class. What you add here is in Result.best;
    of what epoch_row names there is a row for each epoch.
    """
    counts = counts.cpu().double()                                     # Apple GPUs have no float64
    hit, truth, predicted = counts.diag(), counts.sum(1), counts.sum(0)
    there = torch.where(truth + predicted > 0, 1.0, math.nan)          # 0 where a class is in one of the two alone
    scores = {'iou': hit / (truth + predicted - hit), 'dice': 2 * hit / (truth + predicted),
              'precision': hit / predicted.clamp_min(1) * there, 'recall': hit / truth.clamp_min(1) * there}
    means = {f'mean_{key}': float(values.nanmean()) for key, values in scores.items()}
    per_class = {f'{key}_per_class': values.tolist() for key, values in scores.items()}
    one = lambda key: per_class[f'{key}_per_class'][1] if len(counts) == 2 else means[f'mean_{key}']
    constant = truth[1] if len(counts) == 2 else truth.max() / (truth > 0).sum()
    return {'iou': one('iou'), 'dice': one('dice'), 'accuracy': float(hit.sum() / counts.sum()),
            'constant_iou': float(constant / counts.sum()), **means, **per_class}


# ===== optimisation ===================================================================


def find_optimizers():
    """{name in lower case: name} of the optimizers of torch.optim."""
    special = ('Optimizer', 'LBFGS', 'SparseAdam', 'Muon')            # they need closures, sparse or 2-D gradients
    return {name.lower(): name for name, value in vars(torch.optim).items() if name not in special
            and isinstance(value, type) and issubclass(value, torch.optim.Optimizer)}


def build_optimizer(model, config, device):
    """Any optimizer of torch.optim; weight decay for weights only, the fused implementation where there is one."""
    maker = getattr(torch.optim, find_optimizers()[config['optimizer'].lower()])
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError('model: has no weights to train (requires_grad is False for all)')
    exempt = {p for module in model.modules() if 'Norm' in type(module).__name__ or isinstance(module, nn.Embedding)
              for p in module.parameters(recurse=False)}
    exempt |= {p for name, p in model.named_parameters() if re.search('(pos_embed|cls_token|bias_table)$', name)}
    decays = lambda p: p.ndim > 1 and p not in exempt
    groups = [{'params': params, 'weight_decay': config['weight_decay'] if decay else 0.0}
              for decay, params in sorted(grouped(trained, decays).items(), reverse=True)]
    can_fuse = device.type in ('cuda', 'cpu') and all(p.is_floating_point() for p in trained)
    extra = {'momentum': config['momentum'], 'nesterov': config['momentum'] > 0} if maker is torch.optim.SGD else {}
    if extra:                                                          # fused SGD wants a gradient for every weight
        can_fuse &= isinstance(model, SegmentationModel) and not model.is_own
    if maker is torch.optim.Adagrad:                                   # torch 2.6 refuses it on a GPU
        can_fuse &= device.type == 'cpu'
    if 'fused' in inspect.signature(maker).parameters:
        extra['fused'] = can_fuse or None                              # None: torch chooses among the others
    return maker(groups, lr=config['learning_rate'], **extra)


def lr_at_step(step, total_steps, config):
    """Learning rate of an optimizer step: a linear rise over warmup_fraction, then half a cosine down to 1 %."""
    warmup = round(config['warmup_fraction'] * total_steps)
    if step < warmup:
        return config['learning_rate'] * (step + 1) / warmup
    through = (step - warmup) / max(1, total_steps - warmup)
    return config['learning_rate'] * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, through))))


class Parts:
    """The parameters of a model and the places of its buffers, found once: walking through all modules takes as long as
    a hundred small kernels. The buffers are looked up each time, since a forward pass may replace them."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        places = {id(buffer): (module._buffers, name) for module in model.modules()
                  for name, buffer in module._buffers.items() if buffer is not None}
        self.places = [*places.values()]                               # a buffer under two names has one place

    def buffers(self):
        """The buffers in lists, one for each dtype."""
        return grouped((holder[name] for holder, name in self.places), lambda buffer: buffer.dtype).values()

    def averaged(self):
        """(weights and statistics, which a moving average moves; all else, which it copies: a mask may hold -inf)."""
        is_statistic = lambda name: name.endswith(('running_mean', 'running_var'))
        is_moved = lambda tensor: tensor.is_floating_point() or tensor.is_complex()
        return tuple([p for p in self.parameters if is_moved(p) == moved]
                     + [holder[name] for holder, name in self.places if is_statistic(name) == moved]
                     for moved in (True, False))

    @torch.no_grad()
    def copy(self):
        """The values of averaged() as they are: where a moving average begins."""
        return tuple([tensor.clone() for tensor in tensors] for tensors in self.averaged())


@torch.no_grad()
def update_average(average, parts, decay, step, good):
    """Move an average, as Parts.copy gives it, towards what the model has; no weight and no statistic moves where good
    is 0 (a device scalar).

    Early on the decay is (1 + step) / (10 + step), as in TensorFlow's ExponentialMovingAverage.
    """
    decay = min(decay, (1 + step) / (10 + step))
    (averaged, others), (current, fresh), weight = average, parts.averaged(), good * (1 - decay)
    if weight.device.type == 'cpu':                                    # one pass over memory; on a GPU it would wait
        torch._foreach_lerp_(averaged, current, float(weight))
    else:
        steps = torch._foreach_sub(current, averaged)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(averaged, steps)
    for pairs in grouped(zip(others, fresh), lambda pair: pair[1].dtype).values():     # mixed, a GPU copies one by one
        torch._foreach_copy_(*zip(*pairs))


# ===== checkpoints ====================================================================


@dataclasses.dataclass
class TrainState:
    """The state of a training: all of it but `engine` is in last.pt."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: tuple = None          # moving average of what Parts.averaged lists; None: off
    dtype: str = 'float32'         # the rung of precision that healing arrived at
    batch_size: int = 1            # the micro-batch that healing arrived at
    epoch: int = 0
    window: int = 0                # windows of this epoch that are done
    step: int = 0                  # windows of the whole run that are done
    best_score: float = -math.inf
    best_epoch: int = -1
    history: list = dataclasses.field(default_factory=list)
    totals: dict = dataclasses.field(default_factory=dict)    # of the running epoch, on the device
    engine: nn.Module = None       # of several processes: DistributedDataParallel around the model
    bad: dict = dataclasses.field(default_factory=dict)       # unsound steps: total, untold, run (in a row)
    left_out: dict = dataclasses.field(default_factory=dict)  # broken file -> how often it was left out
    images: str = ''               # hashes of what a run began with: hash_images + hash_contents

    PLAIN = ('dtype', 'batch_size', 'epoch', 'window', 'step', 'best_score', 'best_epoch', 'history', 'totals', 'bad',
             'left_out', 'images')

    @property
    def device(self):
        """Where the model is."""
        return next(self.model.parameters()).device

    @functools.cached_property
    def parts(self):
        """The Parts of the model."""
        return Parts(self.model)

    @torch.no_grad()
    def exchange(self, back=False):
        """Put the averaged weights into the model and its own in their place, or (`back`) the other way round. Tensors
        stay where they are, as the optimizer, DDP and CUDA graphs want it."""
        pairs = [*zip(itertools.chain(*self.parts.averaged()), itertools.chain(*self.average))]
        for own, value in reversed(pairs) if back else pairs:          # reversed, as some may share memory
            try:
                kept = own.clone()
            except RuntimeError:                                       # of a full GPU, Apple's too: not half-way
                kept = own.to('cpu', copy=True)
            own.copy_(value)
            value.copy_(kept)

    @contextlib.contextmanager
    def evaluated(self):
        """The model as validation looks at it: with the averaged weights, if there are any, and then not compiled."""
        compiled, is_averaged = self.model._compiled_call_impl, self.average is not None
        if is_averaged:
            self.exchange()
            self.model._compiled_call_impl = None
        try:
            yield self.model
        finally:
            self.model.train()                                         # what it kept in eval mode is of other weights
            if is_averaged:
                self.exchange(back=True)
                self.model._compiled_call_impl = compiled

    def weights(self):
        """The state_dict that validation looks at; of averaged weights a copy, as the model has them for a moment."""
        kept = lambda tensor: tensor if self.average is None else tensor.to('cpu', copy=True)
        with self.evaluated() as model:
            return pytree.tree_map_only(torch.Tensor, kept, model.state_dict())


def random_states():
    """The state of every generator, in types that torch.load(weights_only=True) accepts."""
    kind, keys, *rest = np.random.get_state()
    states = {'python': random.getstate(), 'torch': torch.get_rng_state(), 'numpy': (kind, keys.tolist(), *rest)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states['cuda'] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states['mps'] = torch.mps.get_rng_state()
    return states


def set_random_states(states):
    """Undo of random_states."""
    random.setstate(states['python'])
    torch.set_rng_state(states['torch'])
    np.random.set_state(states['numpy'])
    if 'cuda' in states and torch.cuda.is_available():
        for number, one in enumerate(states['cuda'][:torch.cuda.device_count()]):      # saved where there were others
            torch.cuda.set_rng_state(one, number)
    if 'mps' in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states['mps'])


def state_dict(state, weights):
    """TrainState and its weights() -> a dict of tensors and plain values."""
    return {'model': state.model.state_dict(), 'optimizer': state.optimizer.state_dict(),
            'scaler': state.scaler.state_dict(), 'average': None if state.average is None else weights,
            **{name: getattr(state, name) for name in TrainState.PLAIN}, 'random': random_states(),
            'threads': torch.get_num_threads()}


def restore(state, saved):
    """Put a saved dict back into a TrainState, in place. ValueError where a fused optimizer's states do not have the
    shape of their parameters: its kernels trust shapes and strides, and would write out of bounds."""
    if state.average is not None:
        state.model.load_state_dict(saved['average'] or saved['model'])
        state.average = state.parts.copy()
    state.model.load_state_dict(saved['model'])
    groups = [{**own, 'params': old['params'], 'lr': old['lr']}        # all other settings follow the config
              for own, old in zip(state.optimizer.param_groups, saved['optimizer']['param_groups'])]
    state.optimizer.load_state_dict(saved['optimizer'] | {'param_groups': groups})
    for parameter, kept in state.optimizer.state.items():
        for key, value in kept.items():
            size = torch.Size() if key == 'step' else parameter.shape
            is_like = torch.is_tensor(value) and value.shape == size
            if state.optimizer.defaults.get('fused') and not is_like:
                raise ValueError(f'{key} of the optimizer does not have the shape {tuple(size)}')
            if is_like and key != 'step' and value.stride() != parameter.stride():
                kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    if saved['scaler'] and state.scaler.is_enabled():
        found = {key: saved['scaler'][key] for key in ('scale', '_growth_tracker')}
        state.scaler.load_state_dict(state.scaler.state_dict() | found)
    for name in TrainState.PLAIN:
        setattr(state, name, copy.deepcopy(saved[name]))
    state.bad = to_device(state.bad, state.device)
    state.totals = {} if world().rank else to_device(state.totals, state.device)   # saved: those of all processes
    set_random_states(saved['random'])


def write_file(path, content):
    """Write bytes so that a crash leaves the old file or the new one: temp file, fsync, rename, fsync of the folder.

    content: bytes, or a function that writes into the open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name[:40]}.{os.getpid()}.tmp')     # names may have 255 bytes
    try:
        temporary.unlink(missing_ok=True)                              # it may be a stranger's link, which open follows
        with open(temporary, 'wb') as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)                   # a full disk has no name of its own
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path):
    """fsync of a folder, after which a rename in it survives a power cut."""
    if hasattr(os, 'O_DIRECTORY'):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):                             # Samba and others cannot: EINVAL, EIO, EBADF
            os.fsync(folder)
        os.close(folder)


def save_checkpoint(path, content):
    """Save a dict, whole or not at all; the last.pt before it becomes previous.pt, once this one is verified."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    fresh = path.with_suffix('.new')
    write_file(fresh, buffer.getbuffer())
    verify_checkpoint(fresh)
    if path.exists() and path.name == 'last.pt':
        os.replace(path, path.with_name('previous.pt'))
    os.replace(fresh, path)
    sync_folder(path.parent)


NOT_OURS = 'it holds something else; weights of another program go into a network of that kind, which ' \
           'train(model=NETWORK) takes'


def verify_checkpoint(path):
    """Raise OSError if a checkpoint is torn: it is a zip file, and every entry carries a checksum."""
    if not os.path.isfile(path):                                       # opening a pipe would block
        what = 'is no file' if os.path.exists(path) else f'there is no such file{named_like(path)}'
        raise OSError(f'{path}: {what}')
    with open(path, 'rb') as file:
        head = file.read(9)
    is_other = may_be_read(os.path.basename(path)) or Path(path).suffix in ('.onnx', '.py', '.txt', '.csv', '.json')
    if is_other or head[:4] == b'\x80\2\x8a\n' or head[8:] == b'{':     # torch's form before 1.6, safetensors
        raise OSError(f'{path} is no checkpoint of this program: {NOT_OURS}')
    try:
        with zipfile.ZipFile(path) as file:
            if any(entry.compress_type for entry in file.infolist()) \
                    or sum(entry.file_size for entry in file.infolist()) > os.path.getsize(path):
                raise ValueError('it is compressed, which this program never does, and may be a bomb')
            if damaged := file.testzip():
                raise ValueError(f'{damaged} has another checksum')
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
        raise OSError(f'{path} is damaged: {error}') from None


def load_checkpoint(path):
    """A verified checkpoint -> dict. Never unpickles objects. Raises OSError for a damaged or hostile file."""
    try:
        verify_checkpoint(path)
        content = torch.load(path, map_location='cpu', weights_only=True)
        if not isinstance(content, dict) or not {'format', 'config', 'weights'} <= content.keys() \
                or not isinstance(content['config'], dict) or any(map(torch.is_tensor, content['config'].values())):
            raise ValueError(NOT_OURS)
        refuse_explosion(content)
        return content
    except pickle.UnpicklingError:                                     # torch's words advise to load it nevertheless
        raise OSError(f'{path} holds more than tensors and plain values, which could run code: not loaded') from None
    except OSError as error:                                           # the drive failed, or as verified
        raise OSError(f'{path}: cannot be read: {error.strerror}' if error.errno else str(error)) from None
    except UNREADABLE as error:
        raise OSError(f'{path} is no checkpoint of this program: {in_words(error)}') from None


def refuse_explosion(content, most=10**7):
    """Raise ValueError for lists that hold one another again and again: small as a file, endless to walk."""
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
        waiting += inner
        count += len(inner)
        if count > most:
            raise ValueError(f'it holds more than {most} values, one inside the other')


def checkpoints(folder):
    """The checkpoints of a run that are there, newest first; a crash between two renames leaves last.new."""
    return [path for name in ('last.pt', 'last.new', 'previous.pt') if os.path.exists(path := Path(folder, name))]


def load_last(folder):
    """The newest checkpoint of a run that is whole -> (content, path). Raises UserError if there is none."""
    problems, found = [], checkpoints(folder)
    for path in found:
        try:
            return load_checkpoint(path), path
        except OSError as error:
            problems.append(str(error))
            log.warning('%s%s', error, '; trying the one before it' * (path != found[-1]))
    if problems and Path(folder, 'best.pt').exists():
        problems.append('its best weights, of a network that CONFIG names, begin a new run with:  '
                        + as_typed('initial_weights', Path(folder)))
    raise UserError(problems or f'{folder}: holds no last.pt; there is nothing to resume', 'cannot resume')


# ===== the loop: one step, as a transaction ===========================================


class TrainingDiverged(UserError):
    """Loss or gradients are not finite and no safer precision is left. Names the layer and the files."""
    title, exit_code = 'training diverged', 1


class Rewind(Exception):
    """Internal: go back to the last checkpoint and continue with these changes."""

    def __init__(self, event, **changes):
        self.event, self.changes = event, changes


@dataclasses.dataclass
class StepResult:
    """What one window gave; tensors stay on the device, nothing has waited for them."""
    loss: torch.Tensor             # sum over the images
    images: int
    counts: torch.Tensor           # summed second value of loss_fn (for segmentation the confusion matrix), or None
    norm: torch.Tensor             # of the unscaled gradient, before clipping
    bad: torch.Tensor = None       # bool, set by commit: the loss, a running statistic or the norm is not finite


class UnderAutocast:
    """A model that runs in a given precision, takes samples of any floating-point precision and gives float32 outputs;
    all other attributes (parameters(), training) are those of the model itself."""

    def __init__(self, model, dtype):
        is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        vars(self)['_at_work'] = model, dtype, model.module if is_wrapped else model   # no layer's name

    def __call__(self, *inputs, **named):
        model, dtype, _ = self._at_work
        device = next(model.parameters()).device
        inputs, named = pytree.tree_map_only(torch.Tensor, to_float32, (inputs, named))        # like the weights
        dtype = None if dtype == 'float32' else getattr(torch, dtype)          # torch 2.6 warns of float32 on mps
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return to_float32(model(*inputs, **named))

    def __getattr__(self, name):
        return getattr(self._at_work[2], name)

    def __setattr__(self, name, value):
        setattr(self._at_work[2], name, value)

    def __getitem__(self, key):
        return self._at_work[2][key]

    def __deepcopy__(self, memo):                                      # a loss may copy the model as a teacher
        return UnderAutocast(copy.deepcopy(self._at_work[2], memo), self._at_work[1])


def to_float32(values):
    """Every floating-point tensor in a tensor, list, tuple, dict or dataclass as float32."""
    def cast(x):
        if dataclasses.is_dataclass(x) and not isinstance(x, type):    # a leaf for pytree
            names = [field.name for field in dataclasses.fields(x) if field.init]
            return dataclasses.replace(x, **{name: to_float32(getattr(x, name)) for name in names})
        return x.float() if torch.is_tensor(x) and x.is_floating_point() else x

    return pytree.tree_map(cast, values)


def is_finite(value):
    """False for a floating-point tensor that holds NaN or infinity."""
    return not (torch.is_tensor(value) and value.is_floating_point()) or bool(torch.isfinite(value).all())


def to_device(batch, device):
    """Move every tensor of a batch (dict, list, tuple or tensor). Copies to CUDA are not waited for: its kernels do
    that, while a copy on the CPU may be read at once."""
    kind = torch.device(device).type
    known = lambda x: torch.float32 if kind == 'mps' and x.dtype == torch.float64 else x.dtype     # it has no float64
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device, known(x), non_blocking=kind == 'cuda'), batch)


def is_unjoined(batch):
    """Whether a batch is tuple(zip(*samples)), as detectors take them; default_collate makes lists, of tensors."""
    return type(batch) is tuple and all(isinstance(part, (list, tuple)) for part in batch) \
        and len(set(map(len, batch))) == 1                             # not 2 global and 6 local crops of all samples


def batch_length(batch):
    """Images in a batch: the length of its first tensor that has one, or of the lists in a tuple of lists alone."""
    if is_unjoined(batch):
        return len(batch[0])
    lengths = [len(x) for x in pytree.tree_leaves(batch) if torch.is_tensor(x) and x.ndim]
    if not lengths:
        raise UserError(f'a batch: there is no tensor in this {type(batch).__name__}; collate_fn must give a tensor, '
                        'or a dict, list or tuple of them')
    return lengths[0]


def split_batch(batch, most):
    """A batch as consecutive pieces of at most `most` images (a leftover of one joins its neighbour)."""
    count, whole = batch_length(batch), id(batch)
    are_lists = is_unjoined(batch) or isinstance(batch, dict) and '_left_out' in batch     # ours: masks may be as high
    is_whole = lambda value: torch.is_tensor(value) and value.ndim > 0 and len(value) == count
    # one item per sample; not (x, y) of two samples. By the batch's id: pytree never frees what is_leaf holds
    is_list = lambda value: isinstance(value, (list, tuple)) and len(value) == count and id(value) != whole \
        and (are_lists or not all(map(is_whole, value)))
    cut = lambda value, piece: value[piece[0]:piece[-1] + 1] if is_whole(value) or is_list(value) else value
    return [pytree.tree_map(functools.partial(cut, piece=piece), batch, is_leaf=is_list)
            for piece in split_evenly(np.arange(count), most)]


def run_loss(loss_fn, model, dtype, batch):
    """loss_fn on a batch, moved to the model's device, with the model in a precision -> (losses (B,), counts or None).
    TypeError for any other answer of loss_fn."""
    try:
        answer = loss_fn(UnderAutocast(model, dtype), to_device(batch, next(model.parameters()).device))
    except ValueError as error:
        if 'more than 1 value per channel' in str(error):
            raise UserError(ONE_IMAGE) from None
        raise
    losses, counts = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not torch.is_tensor(losses) or losses.shape != (batch_length(batch),):
        raise TypeError(f'loss_fn(model, batch) must return one loss per sample, shape ({batch_length(batch)},), as '
                        'many as the first tensor of the batch has rows (collate_fn decides which is first); it '
                        f'returned {tuple(losses.shape) if torch.is_tensor(losses) else type(losses).__name__}; of '
                        'a loss per pixel give loss.flatten(1).mean(1), of the mean of a batch loss.expand(samples)')
    if counts is not None and not (torch.is_tensor(counts) and counts.ndim == 2 and len(set(counts.shape)) == 1):
        raise TypeError('a second value of loss_fn(model, batch) must be a confusion matrix, a tensor (K, K)')
    return losses.float(), None if counts is None else counts.detach().to(losses.device)   # or each step's graph stays


def train_step(state, window, loss_fn, config):
    """Gradients of one window, every image weighing the same however it is split -> StepResult. Commits nothing."""
    if not state.model.training:                                       # train() walks through all modules
        state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    # several processes need equally many pieces each; what is not split stays as long as collate_fn made it
    is_whole = world().size > 1 or state.batch_size == config['batch_size']
    pieces = window if is_whole else [piece for batch in window for piece in split_batch(batch, state.batch_size)]
    images = sum(batch_length(piece) - len(broken_rows(piece)) for piece in pieces)
    everywhere = add_up(torch.full((), float(images), device=state.device)).clamp_min(1)       # a copy would wait
    share = world().size / everywhere                                  # times size: DDP averages over processes
    loss, counts = torch.zeros((), device=state.device), None
    for number, piece in enumerate(pieces, 1):
        waits = number < len(pieces) and state.engine is not None      # gradients are exchanged once per window
        with state.engine.no_sync() if waits else contextlib.nullcontext():
            losses, extra = run_loss(loss_fn, state.engine or state.model, state.dtype, piece)
            if not losses.requires_grad:
                raise UserError('the loss has no gradient, as of >, argmax, round, NumPy, detach() or '
                                'no_grad(): compute it from the logits, by operations that can be differentiated')
            state.scaler.scale(losses.sum() * share).backward()
        if number == 1 and len(pieces) > 1 and is_compiled(state.model) and state.engine is None:    # see can_replay
            for parameter in state.parts.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        loss = loss + losses.detach().sum()
        counts = extra if counts is None else counts + extra
    state.scaler.unscale_(state.optimizer)
    norm = nn.utils.clip_grad_norm_(state.parts.parameters, config['grad_clip'] or math.inf)
    return StepResult(*as_plain([loss, images, counts, norm]))


def as_plain(values):
    """Tensors of a class of their own, such as MONAI's MetaTensor, as usual ones: load_checkpoint takes no others."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(torch.Tensor), values)


def add_up(tensor):
    """The sum over all processes, in place; alone, the tensor itself."""
    if world().size > 1:
        dist.all_reduce(tensor)
    return tensor


class Snapshot:
    """What a forward pass can spoil before anyone sees the loss: buffers (BatchNorm statistics) and random states."""

    def __init__(self, parts):
        self.parts = parts
        self.kept = self.now()
        self.random = random_states()                                  # takes a tenth of a millisecond

    def now(self):
        """The values of the buffers as they are: a tensor (N,) for each dtype."""
        return [flat(buffers) for buffers in self.parts.buffers()]

    def is_spoilt(self, now):
        """Whether a buffer has lost finite values, as a bool on the device. A huge activation does that to a variance
        while the loss stays finite."""
        floats = [(kept, value) for kept, value in zip(self.kept, now) if kept.is_floating_point()]
        return sum((torch.isfinite(kept) > torch.isfinite(value)).any() for kept, value in floats) > 0

    def put_back(self):
        """Everything as it was, for a replay."""
        self.write(self.kept)
        set_random_states(self.random)

    def write(self, values):
        """Put values, as now() gives them, into the buffers."""
        for buffers, value in zip(self.parts.buffers(), values):
            torch._foreach_copy_([buffer.data for buffer in buffers],
                                 torch._utils._unflatten_dense_tensors(value, buffers))        # as DDP does


def flat(tensors):
    """The values of all tensors as one (N,): a network has hundreds of small buffers, and each launch takes time."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def commit(state, result, before, config):
    """Make a sound step real and undo an unsound one; fused optimizers do not ask the device which it is."""
    now = before.now()
    bad_loss = add_up((~torch.isfinite(result.loss) | before.is_spoilt(now)).float()) > 0      # in any process
    result.bad = bad_loss | ~torch.isfinite(result.norm)
    first = state.optimizer.param_groups[0]
    may_skip = state.optimizer.state or not first.get('momentum', 1)   # skipping the first step leaves NaN in a state
    if may_skip and all(group.get('fused') for group in state.optimizer.param_groups):
        state.optimizer.grad_scale, state.optimizer.found_inf = None, result.bad.float()
        try:
            state.optimizer.step()                                     # fused kernels skip where found_inf is 1
        finally:                                                       # or the next first step would be skipped too
            del state.optimizer.grad_scale, state.optimizer.found_inf
    elif not result.bad.item():                                        # other optimizers cost one wait for the device
        state.optimizer.step()
    before.write([torch.where(result.bad, kept, value) for kept, value in zip(before.kept, now)])
    blamed = result.bad
    if state.scaler.is_enabled():
        one = torch.ones((), device=state.device)
        scale = state.scaler.scale(one)
        blamed = bad_loss | result.bad & (scale < 1)                   # from 1 up overflows are its normal search
        state.scaler.update()
        state.scaler.update(torch.where(bad_loss, scale, state.scaler.scale(one)))     # a bad loss is not its fault
    if state.average is not None:
        update_average(state.average, state.parts, config['ema_decay'], state.step, 1 - result.bad.float())
    for key, value in (('loss', result.loss), ('counts', result.counts), ('images', float(result.images))):
        if value is not None:
            state.totals[key] = state.totals.get(key, 0) + torch.where(result.bad, 0, value)
    for key, bad in (('total', result.bad), ('untold', blamed), ('run', blamed)):
        state.bad[key] = state.bad.get(key, 0) + bad.long()
    state.bad['run'] *= blamed                                         # in a row: a sound step ends the count


def is_out_of_memory(error):
    """CUDA and NumPy have types for it, the CPU a RuntimeError. Errors of torch.compile are never taken for it."""
    if type(error).__module__.startswith(('torch._dynamo', 'torch._inductor')) or 'primitive descriptor' in str(error):
        return False                                                   # the latter: oneDNN has no such kernel
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ('out of memory', 'not enough memory', 'DefaultCPUAllocator',
                                          'STATUS_ALLOC_FAILED', 'STATUS_NOT_INITIALIZED',     # cuBLAS and cuDNN
                                          'ALLOCATION_FAILED', 'StatusAllocFailed',    # cuDNN from 9 on, MIOpen
                                          'NVML_SUCCESS',              # torch < 2.14, without NVML: MIG, Jetson
                                          'bad_alloc',                 # of C++
                                          'unable to find an engine',  # cuDNN: none whose workspace fits
                                          'could not create a primitive',      # oneDNN
                                          'Invalid buffer size',       # an Apple GPU's for a single tensor
                                          'less than INT_MAX elements', 'canUse32BitIndexMath',    # 32 bits to count
                                          'too large for the channels_last CUDA kernel launch'))


def guarded_step(state, window, loss_fn, config, is_trial=False, is_odd=False):
    """One optimizer step that survives running out of memory -> StepResult.

    The micro-batch is halved and the same window replayed: effective batch, learning rate, BatchNorm statistics and
    random numbers are as if nothing had happened. Raises Rewind when memory runs out inside the update itself,
    UserError where one image is too much.
    `is_trial`: before training. A compiled model then fails in all processes or in none, and all can repeat the step.
    `is_odd`: see compiles_nothing.
    """
    before = Snapshot(state.parts)
    while True:
        try:
            result = train_step(state, window, loss_fn, config)
            break
        except UserError as error:                                     # BatchNorm refuses the one image that fits
            is_starved = True
            if state.batch_size == config['batch_size'] or error.problems != [ONE_IMAGE]:
                raise
        except compiler_faults() as error:
            is_starved = is_out_of_memory(error)
            if not is_starved and (world().size > 1 and not is_trial or not gives_up_compiling(state.model, error)):
                raise                                                  # other processes would wait for this one
        # outside the except block, because the exception keeps the tensors of the failed step alive
        state.optimizer.zero_grad(set_to_none=True)
        before.put_back()
        scale, state.scaler = state.scaler.state_dict(), build_scaler(state.dtype, config, state.device)
        state.scaler.load_state_dict(scale)                            # a new one: the old may have unscaled already
        if is_starved:
            old, state.batch_size = state.batch_size, halve(state, config)
            if is_compiled(state.model) and not is_odd:                # CUDA graphs give no memory back
                torch._dynamo.reset()                                  # it is compiled anew
            torch.cuda.empty_cache()
            record(state, f'out of memory: batch_size {old} -> {state.batch_size}, effective batch unchanged')
    try:
        commit(state, result, before, config)
        return result
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    state.optimizer.zero_grad(set_to_none=True)                        # outside the except block, as above
    if state.batch_size == 1:                                          # no checkpoint: weights may be half updated
        raise UserError(TOO_LARGE, 'out of memory')
    half = halve(state, config)
    raise Rewind(f'out of memory inside the optimizer step: batch_size {state.batch_size} -> {half}', batch_size=half)


def compiler_faults():
    """The exceptions that torch.compile and Triton below it may raise where they do not work; RuntimeError mostly."""
    faults = (RuntimeError, OSError, ImportError, AssertionError, TypeError, ValueError, LookupError, AttributeError,
              subprocess.SubprocessError, MemoryError)                 # the last: of NumPy, in a loss
    with contextlib.suppress(ImportError):                             # it comes with torch for CUDA
        from triton.errors import TritonError
        faults += (TritonError,)
    return faults


def try_to_compile(state, loss_fn, config):
    """Compile in place, which keeps the state_dict keys. Whether that works only shows in the first steps."""
    try:
        state.model.compile(**{'mode': 'reduce-overhead'} if can_replay(state, loss_fn, config) else {})
    except compiler_faults() as error:                                 # such as a Python too new for this torch
        log.warning('torch.compile does not work here (%s); going on without it', in_words(error))


def can_replay(state, loss_fn, config):
    """Whether compiled code may run as CUDA graphs: the host then launches the network as a whole, not kernel by
    kernel, but its results lie where those of the next step will, and each size has a graph, with memory, of its own.
    So only where nobody keeps a result, with a network and a loss of this program's, which runs it once; where images
    have one size, also in validation (that of averaged weights is not compiled); and on one NVIDIA GPU, as measured."""
    is_known = type(loss_fn) is SegmentationLoss and is_of_smp(state.model)
    is_even = not config['progressive_resizing'] and (config['size_policy'] == 'resize' or state.average is not None)
    is_one = world().size == 1 and threading.current_thread() is threading.main_thread()       # torch knows no other
    is_nvidia = state.device.type == 'cuda' and not torch.version.hip  # AMD's have that name too
    return is_known and is_even and is_one and is_nvidia and not config['activation_checkpointing']


def forget_compiled(model):
    """Let a model run eager, and free what its compiled code holds: torch keeps that, with the memory of CUDA graphs,
    also of networks that are gone, and compiles no more than eight in silence."""
    model._compiled_call_impl = None
    model.zero_grad()                                                  # gradients lie in that memory
    with contextlib.suppress(*compiler_faults()):
        torch._dynamo.reset()


def gives_up_compiling(model, error):
    """Whether the model was compiled and the error came out of it, forward or backward (also in mid-run, on a size that
    the compiler has not seen). If so the model is eager from here on; an error with another cause will come again."""
    calls = [(frame.f_code.co_name, frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    # frames of torch, which errors of the loss lack; asking one that is still at work for its locals keeps the error
    is_its_own = any(name == '_engine_run_backward'
                     or name == '_wrapped_call_impl' and frame.f_locals.get('self') is model for name, frame in calls)
    if not is_compiled(model) or not is_its_own:
        return False
    log.warning('torch.compile does not work here (%s); going on without it', in_words(error))
    forget_compiled(model)
    return True


def compiles_nothing(model, is_odd):
    """With a batch of another length than usual, the last of an epoch: a compiled model runs it eager. Else torch would
    compile in mid-run, as long as at the start, and from then on run all batches in code for any length, which is
    slower."""
    runs_eager = is_odd and is_compiled(model)
    return torch.compiler.set_stance('eager_on_recompile') if runs_eager else contextlib.nullcontext()


def is_compiled(model):
    """Whether its calls go to compiled code."""
    return getattr(model, '_compiled_call_impl', None) is not None


def agree_on_compiling(state, batch, loss_fn, config):
    """Each of several processes tries the compiled model alone, before they meet in a step; it is used if all can.
    It is called through DDP, though without its exchange: only there does torch compile one part per bucket of
    gradients, so that one bucket is exchanged while the next is computed, and what is compiled first is kept."""
    try:
        state.model.train()
        with state.engine.no_sync():
            losses, _ = run_loss(loss_fn, state.engine, state.dtype, batch)
            losses.sum().backward()
    except compiler_faults() as error:
        waits = any(isinstance(module, nn.SyncBatchNorm) for module in state.model.modules())
        if is_out_of_memory(error) and waits:
            halve(state, config)                                       # always raises for several processes
        if not is_out_of_memory(error) and not gives_up_compiling(state.model, error):
            raise
        if waits:
            raise UserError(f'torch.compile does not work on process {world().rank} ({in_words(error)}): type '
                            'compile_model=False') from None           # the others wait in SyncBatchNorm
    state.optimizer.zero_grad(set_to_none=True)
    if not all(from_all(is_compiled(state.model))):
        log.warning('torch.compile does not work in all processes; going on without it')
        forget_compiled(state.model)


class OneTooLarge(UserError):
    """A single image does not fit into memory; nothing of its window was kept."""
    title = 'out of memory'


TOO_LARGE = ('one image at a time does not fit into memory either; type a smaller image_size, on a GPU device=cpu; in '
             'a training also activation_checkpointing=True, in a new one a smaller encoder or --preset low_memory')
ONE_IMAGE = ('BatchNorm cannot train on one image whose feature maps are one pixel: type batch_size=2 or more, a '
             'larger image_size, progressive_resizing=0, give more images, or start fewer processes')


def halve(state, config):
    """Half the micro-batch, or UserError with advice: always that in one of several processes, which cannot retry or go
    back alone while the others wait."""
    effective = config['batch_size'] * config['accumulation_steps']
    several = world().size > 1                                         # these divide accumulation_steps first
    at_once = min(config['batch_size'] if several else state.batch_size, effective // world().size)
    if at_once == 1:
        raise OneTooLarge(TOO_LARGE)
    if several:
        fewer = next(n for n in range(at_once // 2, 0, -1) if effective % n == 0)
        raise UserError(f'{at_once} images at once do not fit on process {world().rank}: type batch_size={fewer} '
                        f'accumulation_steps={effective // fewer}, which keeps the effective batch',
                        'out of memory')
    return state.batch_size // 2


def record(state, event):
    """A recovery: a line in the log and a row in the history."""
    log.warning('%s (step %d)', event, state.step)
    state.history.append({'epoch': state.epoch + 1, 'step': state.step, 'event': event})


def look(state, window, loss_fn, config, names, folder, in_vain=False):
    """Read the counters of unsound steps. After max_bad_steps in a row raise DataError if a sample is not finite
    itself, else Rewind to a safer precision, else (there is none) TrainingDiverged, with the window saved for replay.

    Under float16 a non-finite gradient with a finite loss is the scaler's normal search, until its scale is below 1.
    `in_vain`: this was the last step of the run, and no step of its last epoch was sound: raise as well.
    """
    in_a_row = int(state.bad['run'])
    if untold := int(state.bad['untold']):
        state.bad['untold'] = torch.zeros_like(state.bad['untold'])
        steps = 'a step' if untold == 1 else f'{untold} steps'
        record(state, f'skipped {steps}: loss, statistics or gradient not finite')
    if in_a_row < config['max_bad_steps'] and not in_vain:
        return
    refuse_nonfinite_sample(state, window, loss_fn, names)
    lower = safer_dtype(state.dtype, state.device)
    layer = find_nonfinite(state, window, loss_fn, state.dtype)[1]
    if lower:
        many = f'{counted(in_a_row, "unsound step")} in a row' if in_a_row else 'nothing but unsound steps'
        raise Rewind(f'{many} in {state.dtype} ({layer}): back to the last checkpoint, precision {state.dtype} -> '
                     f'{lower}', dtype=lower)
    files = [name for number in range(len(window)) for name in names(number)]
    limit = config['grad_clip'] or math.inf
    clip = 'grad_clip=1.0' if limit > 1 else f'a lower grad_clip (now {limit:g})'
    advice = [f'a lower learning_rate (now {config["learning_rate"]:g}), {clip} or other data may help; where a '
              'resume ends here again the weights had grown too large before they were saved: begin anew']
    with contextlib.suppress(OSError, AttributeError, TypeError, pickle.PicklingError):    # of objects in the batch
        path = folder / f'bad_batch{world().rank or ""}.pt'
        content = describe_model(state.model, config, state.model.state_dict())
        save_checkpoint(path, content | {'window': as_plain(window), 'dtype': state.dtype})
        load_checkpoint(path)                                          # as replay does, which takes no such objects
        advice += ['batch and weights are saved; run them again (with model and loss_fn, if you gave them): '
                   f'import train_unet; print(train_unet.replay({str(path)!r}))']
    raise TrainingDiverged([
        f'{counted(in_a_row, "step")} in a row had a loss or gradient that is not finite, in {state.dtype}: {layer}',
        *shorten([f'in the batch: {name}' for name in files]), *advice])


def refuse_nonfinite_sample(state, window, loss_fn, names):
    """DataError naming a sample that is not finite itself, if the loss is finite only once its values are replaced."""
    unsound = []
    for number, batch in enumerate(window):
        for value in pytree.tree_leaves(batch):
            if not is_finite(value) and value.shape[:1] == (batch_length(batch),):     # one value per sample
                unsound += [(number, i) for i in range(len(value)) if not is_finite(value[i])]
    if not any(from_all(bool(unsound))):                               # SyncBatchNorm below needs every process
        return
    without = pytree.tree_map_only(torch.Tensor, lambda value: value.nan_to_num(0, 0, 0), window)
    is_lost, is_lost_without = (find_nonfinite(state, one, loss_fn, 'float32')[0] for one in (window, without))
    if unsound and is_lost and not is_lost_without:
        number, row = unsound[0]
        samples = names(number)
        is_usual = len(samples) == batch_length(window[number])        # collate_fn may make more or fewer of them
        raise DataError(f'{samples[row] if is_usual else "one of " + ", ".join(shorten(samples))}: holds values that '
                        'are not finite; no precision helps against that')


def safer_dtype(dtype, device):
    """One rung down: float16 -> bfloat16 where it is native -> float32 -> None. All processes must call it."""
    units = common_hardware(detect_hardware(device)).units
    return {'float16': 'bfloat16' if 'bfloat16' in units else 'float32', 'bfloat16': 'float32'}.get(dtype)


def totals_alone(bad):
    """The counters of unsound steps for another try: the total stays, none are in a row or untold yet."""
    return {key: value if key == 'total' else 0 * value for key, value in bad.items()}


def find_nonfinite(state, window, loss_fn, dtype):
    """Run a window forward -> (whether the loss or a running statistic is not finite, what is not finite in words: the
    first layer with such an output, else the statistics, the loss or the gradient)."""
    found, before, is_lost = [], Snapshot(state.parts), False
    sound = [name for name, value in state.model.named_buffers() if is_finite(value)]

    def watch(name, module, inputs, output):
        if not found and not all(map(is_finite, pytree.tree_leaves(output))):
            found.append(f'first not finite: the output of {name} ({type(module).__name__})')

    with contextlib.ExitStack() as after, torch.no_grad():
        after.callback(before.put_back)
        after.enter_context(torch.compiler.set_stance('force_eager'))  # compiled code would not call the hooks
        for name, module in state.model.named_modules():
            after.enter_context(module.register_forward_hook(functools.partial(watch, name or 'the model')))
        forward = functools.partial(run_loss, loss_fn, state.model, dtype)
        for batch in window:
            for losses, _ in in_halves(forward, batch):
                is_lost |= not is_finite(losses)
        is_spoilt = bool(before.is_spoilt(before.now()))
        lost = [name for name in sound if not is_finite(state.model.get_buffer(name))]
    other = f'the statistics of a norm{f" ({lost[0]})" if lost else ""}' if is_spoilt and not is_lost else \
        f'all layers are finite forward, so it is the {"loss" if is_lost else "gradient"}'
    return is_lost or is_spoilt, next(iter(found), other)


def replay(path, model=None, loss_fn=None):
    """Run the bad_batch.pt of a diverged run (or its folder) once more -> the first layer that is not finite, in words.

    A network and a loss of your own are given as they were to train. Raises UserError for a file without a batch.
    """
    try:
        path = file_of(path, 'bad_batch.pt')
        saved = load_checkpoint(path)
    except OSError as error:
        raise UserError(str(error), 'cannot replay') from None
    if not isinstance(saved.get('window'), list):
        raise UserError(f'{path}: holds no batch; wanted is the bad_batch.pt of a run that diverged', 'cannot replay')
    if is_settled(saved):
        model = load(path, 'cpu', model, OFF)
    elif model is None or loss_fn is None:
        raise UserError(f'{path}: holds a network of your own: give model and loss_fn too', 'cannot replay')
    else:
        model.load_state_dict(saved['weights'])
    state = TrainState(model.train() or model, None, None, dtype=saved['dtype'])       # one's own may return nothing
    return find_nonfinite(state, saved['window'], loss_fn or SegmentationLoss(model.config), state.dtype)[1]


# ===== the loop: windows, epochs, evaluation ==========================================


def running_shell():
    """IPython's shell in a notebook or in IPython; falsy elsewhere."""
    return 'IPython' in sys.modules and sys.modules['IPython'].get_ipython()


def progress(iterable, total, description):
    """A tqdm bar in a terminal or notebook, nothing in a pipe or a log file, where the log's lines suffice."""
    shows = not world().rank and (getattr(sys.stderr, 'isatty', bool)() or running_shell())    # services have no stderr
    layout = {'dynamic_ncols': True, 'bar_format': '{desc} {n_fmt}/{total_fmt}{postfix} {remaining} {bar}'}
    with contextlib.suppress(OSError, ValueError, AttributeError):     # stderr is no terminal
        if not os.get_terminal_size(sys.stderr.fileno()).columns:      # some containers report 0
            layout |= {'dynamic_ncols': False, 'ncols': 100, 'nrows': 20}
    return tqdm(iterable, total=total, desc=description, leave=False, disable=not shows, **layout)


def windows(loader, sampler):
    """For each optimizer step left in the epoch: its micro-batches, as (list of arrays of rows, list of batches)."""
    batches = iter(loader)
    for rows in map(sampler.micro_batches, sampler.windows()[sampler.first_window:]):
        yield rows, [next(batches) for _ in rows]


@torch.no_grad()
def evaluate_model(model, loader, loss_fn, dtype, description='[val]', run=None):
    """Mean loss per image and, where loss_fn counts, dataset metrics, without gradients -> dict.

    'broken' lists the rows of the files that could not be read and were left out (skip_broken); 'cut' tells whether
    memory ran out, so that batches were cut. A loss that draws random numbers draws the same in every epoch, and
    training's own are not touched. Every process validates with the first one's BatchNorm statistics.
    """
    if world().size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    model.eval()
    if type(loss_fn) is SegmentationLoss:
        loss_fn.reach = None                                           # found anew: the weights have changed
    forward, before = functools.partial(run_loss, loss_fn, model, dtype), random_states()
    totals, broken = {'loss': torch.zeros((), device=next(model.parameters()).device), 'images': 0}, []
    seed_everything(0)
    in_halves.cut, usual = False, 0                                    # usual: images in a batch
    bar = progress(run.wait_for(loader) if run else loader, len(loader), description)
    try:
        for number, batch in enumerate(bar):
            usual = usual or batch_length(batch)
            with compiles_nothing(model, batch_length(batch) != usual):
                answers = in_halves(forward, batch, model)
            for losses, counts in answers:
                totals['loss'] += losses.sum()
                if counts is not None:
                    totals['counts'] = totals.get('counts', 0) + counts
            broken += (left_out := broken_rows(batch))
            totals['images'] += batch_length(batch) - len(left_out)
            if number % 10 == 0 and not bar.disable:
                bar.set_postfix_str(show_numbers(mean_scores(totals)), refresh=False)
    finally:
        set_random_states(before)
    broken, cut = zip(*from_all((broken, in_halves.cut)))
    return mean_scores(add_totals(totals)) | {'broken': sum(broken, []), 'cut': any(cut)}


def validate(state, loader, loss_fn, config, run):
    """Validate the epoch. If its loss is finite in a safer precision only, the run goes on in that one."""
    def score(dtype):
        with state.evaluated() as model:
            return evaluate_model(model, loader, loss_fn, dtype, f'Epoch {state.epoch + 1} [val]', run)

    metrics, dtype = score(state.dtype), state.dtype
    if len(loader.dataset) == len(metrics['broken']) > 0:              # a drive that is gone
        raise DataError([f'none of the {counted(len(loader.dataset), "validation image")} can be read any more, such '
                         f'as {loader.dataset.name(0)}'])
    while not math.isfinite(metrics['loss']) and (dtype := safer_dtype(dtype, state.device)):
        again = score(dtype)
        if math.isfinite(again['loss']):
            record(state, f'validation is not finite in {state.dtype}: precision {state.dtype} -> {dtype}')
            state.dtype, state.scaler = dtype, build_scaler(dtype, config, state.device)
            state.bad, metrics = totals_alone(state.bad), again
    if metrics.pop('cut'):
        record(state, 'out of memory in validation: batches went through in parts, scores unchanged')
    state.left_out = dict(Counter(state.left_out) + Counter(map(loader.dataset.name, metrics.pop('broken'))))
    return metrics


def in_halves(function, batch, model=None):
    """function(batch), or of its halves and so on where memory runs out -> the answers, in order. in_halves.cut then
    becomes True, for validation, whose loss may call this for tiles. `model`: one that may be compiled, and goes on
    eager if that fails."""
    most, before = batch_length(batch), random_states()
    try:
        return [function(batch)]
    except compiler_faults() as error:
        if is_out_of_memory(error):
            in_halves.cut, most = True, most // 2
        elif model is None or not gives_up_compiling(model, error):
            raise
    if not most:
        raise OneTooLarge(TOO_LARGE)
    set_random_states(before)
    return [answer for part in split_batch(batch, most) for answer in in_halves(function, part, model)]


class Interrupted(BaseException):      # a Dataset that catches each Exception must not take it for a broken file
    """Internal: a signal asks to stop while no step is under way."""


class Run:
    """What a run has outside of its TrainState: its folder, lock and log, what it last saved, the signals it heard."""

    def __init__(self, folder):
        self.folder, self.last_save, self.save_took = Path(folder), time.monotonic(), 0.0      # when, and seconds
        self.last_closed = -math.inf                                   # when an epoch was last saved
        self.asked = 0                                                 # the signal that this process has heard of
        self.begun, self.waiting = False, False                        # training has begun; waiting for a batch
        self.is_own = False                                            # the network, the loss or the data are given
        self.own_loss = False                                          # ... of which the loss
        self.is_crowded = False                                        # by other processes, which was told
        self.after = contextlib.ExitStack()                            # what the end of the run undoes
        self.trouble, self.new_best = '', None                         # last complaint; best.pt until it is written
        self.saved_at, self.wishes = None, {}                          # where it last saved; what was asked as 'auto'
        self.launcher = os.getppid()                                   # torchrun, if there are several processes
        self.board, self.file = None, None                             # TensorBoard's writer; what writes log.txt
        self.undo = None                                               # makes a given network what it was before trials
        self.holder, self.name = self.folder / '.holder', f'process {os.getpid()} on {socket.gethostname()}'

    def __enter__(self):
        try:
            if not world().rank:                                       # only the first process writes
                self.hold()
        except OSError as error:
            self.after.close()                                         # or the lock stays until it is garbage
            raise UserError(f'run_dir={str(self.folder)!r}: cannot be written: {error.strerror}') from None
        self.watch_signals()
        return self

    def __exit__(self, kind, error, _):
        with self.after:                                               # whatever happens on the way
            self.leave(kind, error)

    def leave(self, kind, error):
        """What is left to save, and how to go on."""
        if kind is not KeyboardInterrupt:
            self.save_best()
        undo, self.undo = self.undo, None                              # which holds the network
        if undo and self.saved_at and not self.begun and world().size == 1:
            with contextlib.suppress(UserError, OSError, RuntimeError), usual_settings():      # the GPU may be lost
                undo()
        if self.begun and isinstance(error, UserError):
            if os.path.exists(self.folder / 'last.pt'):                # Path.exists may raise, as in save
                error.problems.append(f'mended? It goes on with:  {self.how_to_resume()}')
            with contextlib.suppress(OSError):                         # the first process may not know of this error
                if world().rank and self.folder.exists():
                    self.open_log()
            prefix = f'process {world().rank}: ' if world().rank else ''
            if self.file:                                              # to the file alone: main() prints it
                for line in str(error).splitlines():
                    self.file.handle(log.makeRecord(log.name, logging.ERROR, '', 0, prefix + line, (), None))

    def how_to_resume(self):
        """What to type to go on."""
        if self.is_own:
            return f'train_unet.train(resume={str(self.folder)!r}, ...) and the network, loss and data of before'
        return command_line(as_typed('resume', self.folder))

    def hold(self):
        """Lock the folder and open its log. Raises UserError if another run holds it, OSError if it takes no files."""
        for path in (self.folder / '.lock', self.holder, self.folder / 'log.txt'):
            if path.is_symlink() or path.exists() and not path.is_file():
                raise UserError(f'{path}: is no file of ours but a link, a pipe or a folder; remove it')
        self.folder.mkdir(parents=True, exist_ok=True)
        self.after.enter_context(contextlib.suppress(OSError))         # the folder may be gone when it ends
        try:
            self.after.enter_context(filelock.FileLock(str(self.folder / '.lock'), timeout=0))
        except filelock.Timeout:
            other = self.other_holder() or 'another run'
            raise UserError(f'{self.folder}: is in use by {other}; wait for its end, or start a new run (where a drive '
                            'has no locks, .lock of a run that was killed stays: delete it)') from None
        except (NotImplementedError, OSError) as error:                # a drive without locks: no second run is refused
            if getattr(error, 'errno', errno.ENOLCK) not in (errno.ENOLCK, errno.ENOTSUP):
                raise
        self.after.callback(lambda: self.other_holder() or self.holder.unlink(missing_ok=True))
        self.holder.write_bytes(self.name.encode())
        for left_over in self.folder.glob('.*.*[0-9].tmp'):            # of a run that was killed in mid-save
            left_over.unlink()
        self.open_log()

    def open_log(self):
        """From here on the lines of the log go into log.txt too."""
        self.file = file = logging.FileHandler(self.folder / 'log.txt', encoding='utf-8')
        file.handleError = lambda record: None                         # a full disk: the lines are on the screen
        plain = logging.Formatter('%(asctime)s %(message)s', '%Y-%m-%d %H:%M:%S')
        file.format = lambda record: clean(plain.format(record))       # file names in it may hold terminal escapes
        log.addHandler(file)
        self.after.callback(file.close)
        self.after.callback(log.removeHandler, file)

    def watch_signals(self):
        """SIGTERM, SIGINT and SIGUSR1 (SLURM's warning) end the run after the step at work, a later SIGINT at once.
        SIGHUP, of a terminal that is closed, ends nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        def stop(number, frame):
            if self.asked and (world().size > 1 or number != signal.SIGINT):   # from its sender, again by torchrun
                return
            if self.asked:
                if not running_shell():                                # a notebook would lose all that it holds
                    signal.signal(signal.SIGINT, signal.SIG_DFL)
                raise KeyboardInterrupt
            self.asked = number
            if self.waiting and world().size == 1:                     # the worker may hang
                raise Interrupted
            if not self.begun:                                         # torchrun ends the others
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            again = ' (Ctrl-C: leave at once)' if world().size == 1 else ''
            say(f'{signal.Signals(number).name}: finishing this step, then saving{again}', sys.stderr)
        hear = lambda *_: (self.waiting or not self.begun) and torch._C._error_if_any_worker_fails()
        torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()         # once: now, or it replaces ours
        for name, handler in {'SIGTERM': stop, 'SIGINT': stop, 'SIGUSR1': stop, 'SIGHUP': signal.SIG_IGN,
                              'SIGCHLD': hear}.items():
            number = getattr(signal, name, None)                       # Windows has only the first two
            if number and signal.getsignal(number) is not None:        # None: of what embeds Python, such as R
                self.after.callback(signal.signal, number, signal.signal(number, handler))

    def open_board(self):
        """Show this run in TensorBoard. Raises UserError where the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter          # optional
        except (ImportError, TypeError, AttributeError) as error:      # the others: of a protobuf that does not suit
            raise UserError(f'tensorboard=True: {in_words(error)}: type  pip install -U tensorboard') from None
        if not world().rank:
            self.board = SummaryWriter(str(self.folder / 'tensorboard'))
            self.after.callback(self.board.close)

    def wait_for(self, loader):
        """The batches of a loader. What samples draw at random takes nothing from the training. A signal ends the wait
        (Interrupted); once training has begun the death of a worker is raised here alone (RuntimeError)."""
        refuse_dead_workers = torch._C._error_if_any_worker_fails
        refuse_dead_workers()                                          # iter() would wait for one
        batches = iter(loader)
        while True:
            before = random_states()
            try:
                self.waiting = True
                if self.asked and world().size == 1:
                    raise Interrupted
                refuse_dead_workers()
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waiting = False
                set_random_states(before)                              # Plain seeds them anew for each sample
            yield batch

    def save(self, state, config, resumed=None):
        """best.pt if it waits, config.py if it was deleted, then last.pt with everything the run is -> True if both
        checkpoints are on the disk. `resumed`: the checkpoint that a resume without a step yet goes on from: its
        settings stay."""
        self.last_save = time.monotonic()
        self.save_best()
        if not os.path.exists(self.folder / 'config.py'):              # Path.exists may raise on a network drive
            self.write('config.py', config_text(resumed['config'] | resumed.get('asked', {}) if resumed
                                                else config | self.wishes))
        weights = state.weights()
        content = state_dict(state, weights) | describe_model(state.model, config | amp_settings(state.dtype), weights)
        content |= {'totals': add_totals(state.totals),                # collective: every process calls save
                    'metrics': [row for row in state.history if not row['event']][-1:],    # of the last whole epoch
                    'asked': {key: config[key] for key in ('use_amp', 'amp_dtype')} | self.wishes,
                    'unsaved': self.new_best, 'own_loss': self.own_loss}
        if resumed:
            known = {'asked': {}, 'own_loss': False} | resumed         # older ones lack these
            content |= {key: known[key] for key in ('config', 'dtype', 'batch_size', 'asked', 'own_loss', 'scaler')}
        saved = self.write('last.pt', content)
        self.save_took = time.monotonic() - self.last_save
        if world().size > 1:
            dist.barrier()                                             # no process reads it before it is there
        if not (saved and self.new_best is None):
            return False
        self.trouble, self.saved_at = '', place_of(state)
        return True

    def is_due(self):
        """Whether the epoch that ends is saved: each one; but where a save takes over a tenth of a second, not before
        ten times as long has gone by since the last. Of few images that may be ten epochs."""
        now = time.monotonic()
        is_due = from_first(lambda: self.save_took < 0.1 or now - self.last_closed > 10 * self.save_took)
        self.last_closed = now if is_due else self.last_closed
        return is_due

    def save_best(self):
        """best.pt, if it waits."""
        if self.new_best is not None and self.write('best.pt', self.new_best):
            self.new_best = None

    def other_holder(self):
        """The run that .holder names, if that is not this one; else ''."""
        with contextlib.suppress(OSError):                             # gone, or its network drive is for a while
            name = self.holder.read_bytes().decode(errors='replace')
            return name if name != self.name else ''
        return ''

    def write(self, name, content):
        """Write a text or a checkpoint (a dict), in the first process -> False if the disk did not take it. That is
        logged once; training goes on, and the next save tries again."""
        if world().rank:
            return True
        try:
            if other := self.other_holder():                           # the folder was deleted, and a new run begun
                raise OSError(f'{self.folder} is in use by {other}')
            if not self.folder.exists():
                log.warning('%s had vanished with all that was in it; it is made anew, the run goes on', self.folder)
            if isinstance(content, str):
                write_file(self.folder / name, content.encode())
            else:
                save_checkpoint(self.folder / name, content)
            return True
        except (OSError, RuntimeError, MemoryError) as error:          # torch reports a failed write as RuntimeError
            self.complain(name, error)
            return False

    def complain(self, name, error):
        """Say what could not be written, once per kind of trouble."""
        why = getattr(error, 'strerror', None) or str(error) or 'out of memory'        # str names the file
        if self.trouble != why:
            kept = '. The checkpoint before it is kept; saving is tried again while training goes on'
            log.warning('%s could not be saved: %s%s', self.folder / name, why, kept if self.begun else '')
        self.trouble = why

    def tell_crowd(self, state, seconds, busy):
        """Warn once if the steps of an epoch, of which one thread worked `busy` seconds, had to share a CPU's cores."""
        threads = torch.get_num_threads() if state.device.type == 'cpu' and world().size == 1 else 1
        if threads > 1 and seconds > 1 and busy < 0.7 * seconds and not (self.is_crowded or is_compiled(state.model)):
            self.is_crowded = True
            log.warning('Other processes keep these cores busy: in its steps the run had %.0f %% of one, and its %d '
                        'threads wait for each other. Begun anew with OMP_NUM_THREADS=1 it may be several times faster',
                        100 * busy / seconds, threads)

    def agree(self, state, config, broken=()):
        """What all processes do now: count the broken files that any of them met, stop (Interrupted) if a signal came
        to one of them, save if it is time by the first one's clock."""
        if world().size > 1 and os.getppid() != self.launcher:         # torchrun was killed, so nobody would end us
            self.asked = signal.SIGTERM
        is_time = time.monotonic() - self.last_save > 60 * config['checkpoint_minutes']
        asked, is_time, broken = zip(*from_all((self.asked, is_time, broken)))
        state.left_out = dict(Counter(state.left_out) + Counter(itertools.chain(*broken)))
        if max(asked):                                                 # not self.asked: one that comes just now waits
            self.asked = max(asked)
            raise Interrupted
        if is_time[0]:
            self.save(state, config)


def place_of(state):
    """How far a training is: it changes whenever a checkpoint would be another one."""
    return state.epoch, state.window, len(state.history)


def add_totals(totals):
    """The totals of an epoch over all processes."""
    parts = from_all({key: torch.as_tensor(value).cpu() for key, value in totals.items()})
    return {key: sum(part[key] for part in parts if key in part) for key in parts[0]}


def mean_scores(totals):
    """Totals -> mean loss per image (NaN of none) and, where loss_fn counts, the metrics of the data set."""
    images = float(totals['images'])
    loss = {'loss': float(totals['loss']) / images if images else math.nan}
    return loss | (compute_metrics(totals['counts']) if 'counts' in totals else {})


def say(line, screen):
    """Write a line above the progress bars. A closed terminal, or a full disk behind it, must not end a training, nor
    a signal while a bar is written: its handler cannot write there then (RuntimeError)."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):       # AttributeError: of pythonw
        tqdm.write(line, screen)
        screen.flush()


class ScreenHandler(logging.Handler):
    """Log lines above the progress bars; of several processes the first one speaks."""

    def emit(self, record):
        if not world().rank and (world().size > 1 or not is_follower()):          # it may not have joined yet
            say(clean(self.format(record)), sys.stdout)


log.handlers = [ScreenHandler()]                                       # importlib.reload() would add a second one


def train_epoch(state, loader, loss_fn, config, run):
    """The rest of the epoch that state is in. Raises Interrupted if someone asked to stop, Rewind, TrainingDiverged."""
    sampler, name_of = loader.batch_sampler, loader.dataset.name
    sampler.epoch, sampler.first_window = state.epoch, state.window
    total_steps = config['num_epochs'] * sampler.num_windows
    small_steps = config['progressive_resizing'] * total_steps
    usual = [*map(len, sampler.micro_batches(sampler.windows()[0]))]
    look_every = 1 if state.device.type == 'cpu' else 20               # reading a counter waits for the device
    started, images, spent = time.monotonic(), 0, np.zeros(2)
    clocks = lambda: np.array([time.monotonic(), time.thread_time()])
    names = lambda number: [name_of(int(row)) for row in rows[number]]     # of a micro-batch of the window at work
    bar = progress(windows(run.wait_for(loader), sampler), sampler.num_windows, f'Epoch {state.epoch + 1} [train]')
    bar.update(state.window)
    for rows, window in bar:
        for group in state.optimizer.param_groups:
            group['lr'] = lr_at_step(state.step, total_steps, config)
        window = [at_half_size(batch, state.device) for batch in window] if state.step < small_steps else window
        if world().rank:                                               # each process draws its own dropout
            seed_everything(seed_of(config['seed'], state.step, world().rank))
        is_odd, at_once = [*map(len, rows)] != usual, state.batch_size
        since = clocks()
        with compiles_nothing(state.model, is_odd):
            result = guarded_step(state, window, loss_fn, config, is_odd=is_odd)
        spent += clocks() - since
        if is_odd and is_compiled(state.model):                        # it ran eager, beside the memory of CUDA graphs
            state.batch_size = at_once
        state.step, state.window, images = state.step + 1, state.window + 1, images + result.images
        if state.window % look_every == 0 or state.window == sampler.num_windows:
            in_vain = state.step == total_steps and all(from_all(images > 0 and not state.totals['images']))
            look(state, window, loss_fn, config, names, run.folder, in_vain)
            if not bar.disable:
                bar.set_postfix_str(live_numbers(state, images / max(1e-9, time.monotonic() - started)), refresh=False)
        seconds = max(1e-9, time.monotonic() - started)                # / size, as totals are summed over processes
        state.totals |= {'seconds': torch.tensor(seconds / world().size), 'speed': torch.tensor(images / seconds)}
        run.agree(state, config, [name_of(row) for batch in window for row in broken_rows(batch)])
    run.tell_crowd(state, *spent)


def at_half_size(batch, device):
    """A batch with images and masks at half their height and width: pixels averaged, masks as by nearest_value."""
    images, masks = to_device([batch['image'], batch['mask']], device)
    height, width = (side // 2 for side in masks.shape[-2:])           # an odd side loses its last pixels
    first, second = (masks[..., n:2 * height:2, n:2 * width:2] for n in (0, 1))
    turns = torch.arange(height, device=device)[:, None] + torch.arange(width, device=device)
    small = F.avg_pool2d(images.float(), 2)                            # mode='area' wants even sides on Apple GPUs
    small = small if images.is_floating_point() else small.round().to(images.dtype)
    return batch | {'image': small, 'mask': torch.where(turns % 2 > 0, first, second)}


def broken_rows(batch):
    """Rows of the images of a batch that could not be read and were left out (skip_broken)."""
    return batch['index'][batch['_left_out']].tolist() if isinstance(batch, dict) and '_left_out' in batch else []


def show_numbers(scores, side=''):
    """Loss and IoU as text; `side`: the prefix of the keys, '', or in rows of the history 'train_' or 'val_'."""
    return ' '.join(f'{name} {scores[side + key]:.3f}' for name, key in (('loss', 'loss'), ('IoU', 'iou'))
                    if side + key in scores)


def live_numbers(state, speed):
    """What the bar shows, in 80 columns. Called every few steps only, as reading the totals waits for the device."""
    rate = state.optimizer.param_groups[0]['lr']
    memory = f' {peak_memory(state) / 2**30:.1f} GiB' if state.device.type == 'cuda' else ''
    return f'{show_numbers(mean_scores(state.totals))} lr {rate:.1e} {speed:.1f} images/s {state.dtype}{memory}'


def epoch_row(state, metrics):
    """The row of history.csv for the epoch that has just been validated."""
    totals = add_totals(state.totals)
    scores = mean_scores(totals)
    row = {'epoch': state.epoch + 1, 'step': state.step, 'event': '', 'lr': state.optimizer.param_groups[0]['lr']}
    row |= {f'train_{key}': scores[key] for key in ('loss', 'iou', 'dice') if key in scores}
    row |= {f'val_{key}': metrics[key] for key in ('loss', 'iou', 'dice', 'mean_iou') if key in metrics}
    row |= {'precision': state.dtype, 'batch_size': state.batch_size, 'skipped_steps': int(state.bad.get('total', 0)),
            'loss_scale': state.scaler.get_scale() if state.scaler.is_enabled() else None,
            'images_per_second': round(float(totals.get('speed', math.nan)), 2),
            'seconds': round(float(totals.get('seconds', 0)), 2)}
    if state.device.type == 'cuda':
        row['peak_memory_gib'] = peak_memory(state) / 2**30
    return row


def peak_memory(state):
    """The most bytes of a GPU that training took so far; compiled, all that torch holds: CUDA graphs keep theirs."""
    most = torch.cuda.max_memory_reserved if is_compiled(state.model) else torch.cuda.max_memory_allocated
    return most(state.device)


def score_of(metrics):
    """What the best epoch is chosen by."""
    score = metrics['iou'] if 'iou' in metrics else -metrics['loss']
    is_empty = math.isnan(score) and math.isfinite(metrics['loss']) and not math.isnan(metrics['accuracy'])
    return 1.0 if is_empty else score                                  # no class to find, and none was invented


def keep_if_best(state, metrics, config, run):
    """Whether this epoch is better than all before. If so its weights are put into run.new_best, to become best.pt."""
    score = score_of(metrics)
    least = state.best_score - 1e-9 * math.isnan(metrics.get('iou', 0))        # nothing to find: what learnt longer
    if state.best_score > -math.inf and not score > least:             # a NaN is better than nothing
        return False
    content = describe_model(state.model, config | amp_settings(state.dtype), state.weights())
    content |= {'metrics': metrics, 'epoch': state.epoch + 1}
    run.new_best = None if world().rank else copy.deepcopy(to_device(content, 'cpu'))  # training changes the weights
    state.best_score, state.best_epoch = -math.inf if math.isnan(score) else score, state.epoch
    return True


def close_epoch(state, metrics, config, run, took):
    """The epoch's row and line, what is best so far, and everything saved if that is due. Moves state to the next
    epoch. `took`: seconds of its validation."""
    row = epoch_row(state, metrics)
    patience = config['early_stopping_patience']
    if not math.isfinite(metrics['loss']):
        log.warning('The validation loss is not finite, in %s', state.dtype)
    is_best, is_due = keep_if_best(state, metrics, config, run), run.is_due()
    is_small = row['epoch'] <= small_epochs(config)
    if is_best and is_due:
        run.save_best()
    state.history.append(row)                                          # last: memory may run out before
    if math.isnan(row['train_loss']):
        done = 'no sound step'
    elif is_best:
        saved = ', saved best.pt' if run.new_best is None else ', NOT saved'
        done = f'best so far{saved if is_due else ""}'
    elif since := epochs_in_vain(state.history, state.best_epoch, config):
        done = f'no better for {counted(since, "epoch")}' + (f', stops at {patience}' if patience else '')
    elif state.best_epoch >= state.epoch:                              # see best_beyond
        done = 'no better than best.pt'
    else:
        done = f'no better{", on small images" if is_small else ""}'
    state.epoch, state.window, state.totals = state.epoch + 1, 0, {}
    memory = f' | {row["peak_memory_gib"]:.1f} GiB' if 'peak_memory_gib' in row else ''
    minutes = (config['num_epochs'] - state.epoch) * (row['seconds'] + took) / 60      # if all epochs are run
    over = 'over ' if is_small else ''                                 # later epochs take longer
    left = f' | {over}{minutes:.0f} min left' if minutes >= 1 else ''
    log.info('Epoch %d/%d  train %s | val %s | lr %.1e | %.1f images/s | %s%s | %s%s', row['epoch'],
             config['num_epochs'], show_numbers(row, 'train_'), show_numbers(row, 'val_'), row['lr'],
             row['images_per_second'], state.dtype, memory, done, left)
    if is_due:
        run.save(state, config)                                        # after the line, or a kill between them loses it
    run.write('history.csv', history_csv(state.history))


def show_epoch(run, state, val_data):
    """The epoch's numbers as curves in TensorBoard, and after a best epoch its predictions; nothing if it is off."""
    if run.board is None:
        return
    row = state.history[-1]
    try:
        for key, value in row.items():
            if isinstance(value, (int, float)) and key not in ('epoch', 'step'):
                run.board.add_scalar(key, value, row['step'])
        if state.best_epoch == state.epoch - 1 and isinstance(val_data, SegmentationDataset):      # not one's own
            with torch.compiler.set_stance('force_eager'), state.evaluated() as model:     # or compiled anew in mid-run
                page = draw_samples(model.eval(), val_data, run.folder / 'samples.png', state.dtype)
            run.board.add_image('samples', np.asarray(page), row['step'], dataformats='HWC')
        run.board.flush()
    except (OSError, RuntimeError, MemoryError, UserError) as error:   # as in finish: pictures end no training
        run.complain('tensorboard', error)


def small_epochs(config):
    """How many epochs train on images of half the size, the last of them perhaps in part."""
    return math.ceil(config['progressive_resizing'] * config['num_epochs'])


def epochs_in_vain(history, best_epoch, config):
    """How many epochs since the best one count for early stopping: not those on small images, whose scores are lower
    anyway, nor the first fifth of the run (at most 40: of few images an epoch is a step or two), nor those without a
    sound step."""
    last = max(best_epoch + 1, small_epochs(config), min(40, config['num_epochs'] // 5))
    return sum(row['epoch'] > last and math.isfinite(row['train_loss']) for row in history if not row['event'])


def history_csv(history):
    """All rows with all columns that any of them has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in history for key in row)))
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def describe_model(model, config, weights):
    """What makes weights usable years later: the weights (of a state_dict), the config, the preprocessing, versions."""
    versions = {'python': sys.version.split()[0], 'torch': str(torch.__version__), 'numpy': np.__version__}
    for name in ('segmentation_models_pytorch', 'albumentations'):     # by metadata, without importing them
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):     # not installed as a package
            versions[name] = importlib.metadata.version(name)
    facts = ('threshold', 'pixels', 'coding', 'side', 'stride') if isinstance(model, SegmentationModel) else ()
    return {'format': 1, 'weights': weights, 'config': config, 'versions': versions,
            **{name: getattr(model, name) for name in facts}}


# ===== training =======================================================================


@dataclasses.dataclass
class Result:
    """What train returns: the history (one dict per epoch or event), best metrics, the best model, and the folder."""
    history: list
    best: dict
    model: nn.Module = dataclasses.field(repr=False)
    run_dir: Path
    stopped_by: int = 0            # number of the signal that ended the run early; 0: it ran to its end
    is_saved: bool = True          # False: the disk did not take the newest weights

    def __fspath__(self):
        """What takes a run folder takes the Result too: evaluate(result), load(result)."""
        return os.fspath(self.run_dir)

    def _repr_html_(self):
        """In a notebook: the best score, the last ten epochs, the curves and the samples."""
        score = ', '.join(f'{key} {self.best[key]:.4f}' for key in ('iou', 'dice', 'loss') if key in self.best)
        rows = [row for row in self.history if not row['event']][-10:]
        lines = [f'epoch {row["epoch"]}: train {show_numbers(row, "train_")}, val {show_numbers(row, "val_")}'
                 for row in rows]
        pictures = [self.run_dir / name for name in ('curves.png', 'samples.png')]
        encoded = [base64.b64encode(path.read_bytes()).decode() for path in pictures if path.exists()]
        text = html.escape('\n'.join([f'{self.run_dir}: {score}', *lines]))
        return f'<pre>{text}</pre>' + ''.join(
            f'<img src="data:image/png;base64,{data}" style="max-width: 100%">' for data in encoded)


def forget_shown():
    """Drop the Results of earlier runs that IPython keeps because a cell has shown them: each holds a model."""
    shell = running_shell()
    if not shell:
        return
    for names in (shell.user_ns.get('_oh', {}), shell.user_ns, shell.user_ns_hidden, vars(shell.displayhook)):
        for name, value in names.items():
            if isinstance(value, Result) and re.fullmatch(r'_*\d*', str(name)):    # Out[3], _3, _ and __
                names[name] = ''                                       # what IPython's _ starts as
    last = getattr(shell, 'last_execution_result', None)               # of the cell before this one
    if isinstance(getattr(last, 'result', None), Result):
        last.result = None


def choose_run_dir(config, name):
    """A new folder runs/<name>-<number>, or the one that the config names. UserError for one that holds the data."""
    if config['run_dir'] != 'auto':
        refuse_data(config)
        return Path(config['run_dir'])
    name = re.sub(r'[^\w-]+', '_', name)[:60] or 'run'
    for number in itertools.count(1):
        folder = Path('runs') / f'{name}-{number}'
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True)
            return folder
        if not folder.exists():                                        # Run.hold() will fail likewise, and say why
            return folder


def find_resume(config, wants_epochs):
    """The run folder to continue, or None. resume='auto': run_dir, else the newest run on this data, if unfinished.
    `wants_epochs`: num_epochs was typed."""
    wish, run_dir = config['resume'], Path(config['run_dir'])
    if wish is None:
        return None
    if wish != 'auto':
        return Path(wish).parent if os.path.isfile(wish) else Path(wish)       # of runs/x/last.pt
    if config['run_dir'] != 'auto':                                    # a finished one is resumed too: nothing to do
        return run_dir if checkpoints(run_dir) else None
    if config['data'] == OWN_DATA:
        raise UserError("resume='auto' cannot tell which run saw these data sets: give run_dir too", 'cannot resume')
    saved_at = lambda folder: max(map(os.path.getmtime, checkpoints(folder)))
    for folder in sorted(filter(checkpoints, Path('runs').glob('*')), key=saved_at, reverse=True):
        try:
            data = load_preset(folder / 'config.py').get('data')       # faster than a checkpoint of gigabytes
        except ConfigError:
            if not (folder / 'log.txt').exists():                      # another program's last.pt
                continue
            data = load_last(folder)[0]['config'].get('data')
        if absolute(data) == absolute(config['data']):
            return None if is_over(load_last(folder)[0], config['num_epochs'] if wants_epochs else None) else folder
    return None


def is_over(saved, num_epochs):
    """Whether a saved run has stopped early, or has done its epochs: `num_epochs` if that is a number, else its own."""
    with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):     # see refuse_nonsense
        settings = saved['config']
        last = num_epochs if isinstance(num_epochs, int) else settings['num_epochs']
        patience = settings['early_stopping_patience'] or math.inf
        return saved['epoch'] >= last or epochs_in_vain(saved['history'], saved['best_epoch'], settings) >= patience
    return False


def absolute(data):
    """The absolute path of data; 'demo', and what is no path, stay as they are."""
    return os.path.abspath(os.path.expanduser(data)) if isinstance(data, str) and data != 'demo' else data


# Settings that may change on resume without changing the result (what is in the data is compared by itself); of the
# others, some cannot change at all.
FREE_ON_RESUME = set('data images masks image_pattern mask_pattern num_workers cache_images checkpoint_minutes resume '
                     'run_dir activation_checkpointing class_names tensorboard encoder_weights max_image_pixels '
                     'device'.split())
FIXED_ON_RESUME = set('architecture encoder decoder_channels in_channels num_classes optimizer image_dtype mask_values '
                      'seed val_fraction fold group_pattern ema_decay mean std initial_weights init_scale'.split())


def refuse_own_data(config, run):
    """UserError for the settings of a run on data sets of the user's own, which only Python has."""
    if config['data'] == OWN_DATA:
        raise UserError(f'{run}: was trained on data sets of your own: go on from Python, with what it began '
                        'with', 'cannot resume')


def resume_config(folder, preset, overrides):
    """The settings that the last checkpoint was trained with, changed by the typed ones -> as resolve_config, with
    'default' as the source of all that did not change. ConfigError for changes that a resumed run cannot have."""
    saved = load_last(folder)[0]
    before = CONFIG | {'oversample_foreground': 0.0, 'mirror': True}   # a key may be new: as it was without
    trained = {key: saved['config'].get(key, value) for key, value in before.items()}
    trained |= {**saved.get('asked', {}), 'run_dir': 'auto', 'resume': str(folder)}    # precision as before any healing
    if trained['loss'] == 'auto':                                      # of older runs
        trained['loss'] = 'ce+dice'
    config, sources, notes = resolve_config(preset, overrides, base=trained)
    for key in ('data', 'initial_weights', 'augment'):
        if absolute(config[key]) == absolute(trained[key]):            # the same path, typed another way
            config[key] = trained[key]
    if config['optimizer'].lower() == trained['optimizer'].lower():    # sgd is SGD
        config['optimizer'] = trained['optimizer']
    if config['use_amp'] is False and sources['amp_dtype'] == 'default':       # nobody typed it
        config['amp_dtype'] = trained['amp_dtype'] = 'auto'
    for key, value in config.items():                                  # 'auto': what it was settled to
        if value == 'auto' and key not in ('class_weights', 'device', 'cache_images', 'num_workers'):  # of the machine
            config[key] = trained[key]
    changed = [key for key in CONFIG if config[key] != trained[key]]
    is_kept = type(trained['progressive_resizing']) is float and sources['progressive_resizing'] == 'default'
    if is_kept and config['num_epochs'] > trained['num_epochs']:       # or images would be small once more
        config['progressive_resizing'] *= trained['num_epochs'] / config['num_epochs']
    anew = f'; a new run with {as_typed("initial_weights", folder)} begins with its weights'
    anew = anew if (folder / 'best.pt').exists() else ''
    fixed = [f'{key}={config[key]!r}: cannot change on resume (the run has {trained[key]!r})'
             + (anew if key in ('num_classes', 'mask_values') else '') for key in changed if key in FIXED_ON_RESUME]
    was, now = (settings['batch_size'] * settings['accumulation_steps'] for settings in (trained, config))
    if was != now:                                                     # the steps done would not be those of the rest
        steps, rest = divmod(was, config['batch_size'])
        cure = '' if rest else f'; with batch_size={config["batch_size"]} type accumulation_steps={steps}'
        fixed.append(f'batch_size x accumulation_steps = {now}: must stay {was} on resume{cure}')
    if 'num_epochs' in changed and isinstance(done := saved.get('epoch'), int) and config['num_epochs'] < done:
        fixed.append(f'num_epochs={config["num_epochs"]}: {done} are done already')
    if config['run_dir'] != 'auto' and os.path.realpath(config['run_dir']) != os.path.realpath(folder):
        fixed.append(f'run_dir={config["run_dir"]!r}: a resumed run stays where it is, in {folder}')
    is_moved = config['data'] not in ('demo', OWN_DATA) and not os.path.exists(config['data'])
    if is_moved and config['data'] == trained['data']:
        fixed.append(f'{config["data"]}: is not there; if it has moved type data=NEW_PLACE too')
    if fixed:
        raise ConfigError(fixed)
    notes += [f'{key}: {trained[key]!r} -> {config[key]!r} may change the result of the run'
              for key in changed if key not in FREE_ON_RESUME]
    if 'encoder_weights' in changed:
        notes.append('encoder_weights: no effect, the run has weights')
    return config, {key: sources[key] if key in changed else 'default' for key in sources}, notes


def refuse_differences(config, folder):
    """UserError unless all processes continue the same run, with the same settings of all that decides a result: they
    would wait for each other, or each train a network of its own."""
    ours = {key: value for key, value in config.items() if key not in FREE_ON_RESUME - {'encoder_weights'}}
    ours |= {key: config[key] if config[key] in ('demo', None) else 'PATH' for key in ('data', 'initial_weights')}
    if os.path.isfile(ours['augment']):
        ours['augment'] = Path(ours['augment']).read_bytes()           # by whatever path, as those two
    folders, settings = zip(*from_all((str(folder), ours)))
    if len({*folders}) > 1:
        raise UserError('not all processes find the run that is to be continued: its folder must be one that all '
                        'machines share', 'cannot resume')
    others = [(key, rank, theirs[key]) for rank, theirs in enumerate(settings) for key in ours
              if theirs[key] != settings[0][key]]
    if others:
        raise ConfigError([f'{key}={shown(value)}: of process {rank}; the first has {shown(settings[0][key])}, and all '
                           'need the same settings' for key, rank, value in others])


def warn(*notes):
    """Notes as warnings in the log."""
    for note in notes:
        log.warning('Note: %s', note)


@contextlib.contextmanager
def as_learnt(config, coding='', other=False):
    """Where masks are not those that a network has learnt a DataError says what it knows (`coding`: in words) instead
    of lines that would be refused. Of other data mask_values may say what they mean."""
    refused = 'num_classes=' if other else 'num_classes=|mask_values=|after a colon'
    try:
        yield
    except DataError as error:
        of_file = lambda line: ': cannot be read: ' in line            # which one, is to be told all the same
        rest = [line if other else line.removesuffix('; type mask_values=alpha') for line in error.problems
                if of_file(line) or not re.search(refused, line) and not has_more_classes(line, config)]
        if len(rest) < len(error.problems):
            known = f'{config["num_classes"]} classes' + (f': {clean(coding)}' if coding else '')
            rest.append(f'(the network knows {known}; others want a run of their own, which initial_weights=RUN begins '
                        'with these weights)')
        error.problems = rest
        raise


def prepare(config, sources, device, decode=False, own_data=False):
    """Precision and data of a config -> (config with every 'auto' settled, hardware, precision, data, reasons): the one
    way that train, check and tune come to them. `decode`: look at every pixel; `own_data`: the user brings it."""
    set_up_device(device)
    if config['initial_weights'] and not config['resume']:
        config = with_initial_network(config, sources)
    if device.type == 'cpu':
        keep_freed_memory()
    if device.type == 'cuda' and device.index is not None:             # or pinned memory belongs to the first GPU
        torch.cuda.set_device(device)
    hardware = common_hardware(detect_hardware(device))
    if hardware.kind == 'cpu' and config['device'] == 'auto' and not torch.version.cuda and shutil.which('nvidia-smi'):
        warn('there is an NVIDIA GPU, but this PyTorch was built without CUDA and trains on the CPU: '
             'https://pytorch.org/get-started tells the line that installs the other one')
    chosen = {key for key, origin in sources.items()                   # typed, or set by a preset to something else
              if origin == 'you' or origin != 'default' and config[key] != CONFIG.get(key)}
    precision = resolve_precision(config, hardware, chosen)
    if multiprocessing.current_process().daemon and config['num_workers'] != 0:
        config = {**config, 'num_workers': 0}
        log.info('num_workers = 0  (a process of multiprocessing.Pool can start none)')
    if config['channels_last'] == 'auto':
        config = {**config, 'channels_last': suits_channels_last(precision, hardware)}
        if not config['channels_last']:
            log.info('channels_last = False  (faster on Tensor Cores alone, which this run does not use)')
    if own_data:
        if sources['data'] == 'you':
            warn('data: no effect beside train_data and val_data')
        return settle_own(config), hardware, precision, None, {}
    if config['data'] == 'demo' and os.path.isdir('demo'):
        warn('data=demo is the built-in set; data=demo/ is the folder')
    data = from_first(lambda: inspect_data(config, decode))
    if config['resume']:                                               # which refuses these lines
        data.notes = [note for note in data.notes if not re.search(rf'\b({"|".join(FIXED_ON_RESUME)})=', note)]
    if not len(data.pairs.rows('train')):
        is_list = os.path.isfile(os.path.expanduser(config['data']))
        raise DataError(['no training image is left: they are broken, do not fit their masks, or are in '
                         + ('lines of other splits (without the column chance splits)' if is_list else
                            'folders of other splits'), *data.notes])
    if np.count_nonzero(data.shares) < 2:
        raise DataError(['every pixel of the training masks is of one class, or ignored: there is nothing to learn; '
                         'say in mask_values what the values mean, or draw another split, with another seed or '
                         'val_fraction, if validation alone holds the others', *describe_data(data, config)])
    if config['image_dtype'] == 'auto':                                # 16 bits become 0 to 1 when they are read
        config = {**config, 'image_dtype': 'uint8' if find_image_dtype(data) == 'uint8' else 'float32'}
    config, why = settle(config, hardware, data, config['data'] == 'demo')
    may_search = not (config['deterministic'] or torch.version.hip)    # AMD's search takes minutes
    torch.backends.cudnn.benchmark = config['size_policy'] == 'resize' and may_search      # images of one size
    return config, hardware, precision, data, why


NETWORK_KEYS = 'architecture', 'encoder', 'encoder_weights', 'decoder_channels', 'in_channels'


def with_initial_network(config, sources):
    """The config with the network of the run that initial_weights names. ConfigError if others are typed."""
    trained = load(config['initial_weights'], 'cpu', None, OFF).config            # load sets encoder_weights to None
    found = {key: trained[key] for key in NETWORK_KEYS if key != 'in_channels' or sources[key] == 'default'}
    problems = [f'{key}={config[key]!r}: the network of initial_weights has {value!r}; leave {key} out'
                for key, value in found.items() if sources[key] != 'default' and config[key] not in ('auto', value)]
    if problems:
        raise ConfigError(problems)
    return config | found


def take_initial(model, config):
    """Start from the weights of another run. The first convolution's are fitted to other channels; others of another
    shape, as in the last layer where there are other classes, stay new."""
    saved, own = load(config['initial_weights'], 'cpu', None, OFF).network.state_dict(), model.network.state_dict()
    taken = {name: value for name, value in saved.items() if value.shape == own[name].shape}
    fitted = {name: for_channels(saved[name], value.shape[1]) for name, value in own.items() if name not in taken
              and value.ndim == saved[name].ndim == 4 and value[:, 0].shape == saved[name][:, 0].shape}
    model.network.load_state_dict(own | taken | fitted)
    listed = lambda names: ', '.join(shorten(names, 4)) or 'none'
    log.info('initial weights: %d of %d tensors are those of %s%s; new: %s', len(taken), len(own),
             config['initial_weights'], f'; fitted to other channels: {listed(fitted)}' if fitted else '',
             listed(name for name in own if name not in taken | fitted))


def for_channels(kernels, count):
    """(out, in, h, w) -> (out, count, h, w), as smp fits pretrained ones: the sum for one channel, else each in turn,
    weaker if there are more."""
    if count == 1:
        return kernels.sum(1, keepdim=True)
    before = kernels.shape[1]
    return kernels[:, torch.arange(count) % before] * (before / count)


def settle_for_own(model, loss_fn, config, sources, why):
    """Take from `config` and `why` what a given network or loss decides itself, and tell which typed settings have no
    effect. progressive_resizing='auto' becomes 0: the network may want one size."""
    idle = [] if model is None else ['architecture', 'encoder', 'encoder_weights', 'decoder_channels']
    idle += [] if loss_fn is None else ['loss', 'class_weights']
    if typed := [key for key in idle if sources[key] != 'default']:
        warn(f'{", ".join(typed)}: no effect, a network or loss of your own decides that itself')
    for key in idle:
        why.pop(key, None)
    if model is None:
        return
    config['encoder_weights'] = None                                   # their mean and std are not for this network
    if why.pop('progressive_resizing', None):
        config['progressive_resizing'] = 0.0
    if isinstance(model, SegmentationModel) and not model.is_own:      # of an earlier run: load builds it again
        config |= {key: model.config[key] for key in ('architecture', 'encoder', 'decoder_channels')}


def settle_statistics(config, dataset, model=None):
    """Settle mean and std, and warn of doubtful ones that the user gave -> {key: reason} of the others."""
    typed = {key: config[key] for key in ('mean', 'std') if config[key] != 'auto'}
    for key, value in typed.items():
        if len(value) not in (1, config['in_channels']):
            raise ConfigError(f'{key}={value}: {len(value)} numbers for in_channels={config["in_channels"]}')
    why = {}
    if len(typed) < 2:
        *found, reason = usual_statistics(config, dataset, model)
        config |= dict(zip(('mean', 'std'), found)) | typed
        why = {key: reason for key in ('mean', 'std') if key not in typed}
    if typed:
        warn(*doubts_of_statistics(config, dataset))
    return why


def usual_statistics(config, dataset, model):
    """(mean, std, reason): what a network that goes on knows, from initial_weights or as a model of an earlier run,
    unless the images are of another kind or scale; what pretrained weights know; else what the training images have."""
    trained = load_checkpoint(file_of(config['initial_weights']))['config'] if config['initial_weights'] else \
        model.config if isinstance(model, SegmentationModel) else {}
    if trained and all(trained[key] == config[key] for key in ('in_channels', 'image_dtype')):
        known = trained['mean'], trained['std']
        if not doubts_of_statistics(config | dict(zip(('mean', 'std'), known)), dataset):
            return *known, 'of the network that goes on'
    if config['encoder_weights'] and config['in_channels'] in (1, 3) and config['image_dtype'] == 'uint8':
        return *from_first(lambda: encoder_statistics(config)), 'of encoder_weights'
    return *image_statistics(dataset, config), 'of the training images'


def encoder_statistics(config):
    """(mean, std) of the images that the encoder's weights were trained on, of 255, as smp says; ImageNet's, which most
    have, where smp would have to ask a server that is out of reach."""
    name = config['encoder']
    if name not in smp.encoders.encoders:                              # an older name that smp takes for one of timm's
        name = name.replace('timm-', 'tu-tf_' if 'mobilenetv3' in name else 'tu-')
    try:
        with asking_hub():
            params = smp.encoders.get_preprocessing_params(name, config['encoder_weights'])
    except (OSError, ValueError, ImportError):
        params = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
    found = [[255 * number for number in params[key]] for key in ('mean', 'std')]
    return found if config['in_channels'] == 3 else np.mean(found, 1, keepdims=True).tolist()      # summed: grey as RGB


def doubts_of_statistics(config, dataset):
    """[a note] if mean and std are of another scale than a few training images, such as 0 to 1 for 0 to 255."""
    with contextlib.suppress(DataError):                               # told elsewhere
        found, spread = map(np.array, image_statistics(dataset, config, most=8))
        mean, std = np.array(config['mean']), np.array(config['std'])
        if (np.maximum(abs(found - mean), spread) > 10 * std).any() or (std > 200 * spread).all():
            return [f'mean={config["mean"]}, std={config["std"]}: the images have mean={found.tolist()}, '
                    f'std={spread.tolist()}; leave both out, or type them in the unit of the images']
    return []


def build_state(model, config, precision, device, sizes=()):
    """A fresh TrainState on the device. `sizes`: of the images, for try_size."""
    model = model.to(device)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if 0 in tensor.stride():                                       # of expand(): its elements share memory
            tensor.data = tensor.data.contiguous()
    if isinstance(model, SegmentationModel) or device.type == 'mps':   # your own may rely on its layout
        model = laid_out(model, config, device)
    if isinstance(model, SegmentationModel):
        try_size(model, sizes)
    optimizer, engine = build_optimizer(model, config, device), None   # refuses what cannot train, before DDP would
    if world().size > 1:
        if device.type == 'cpu' and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise UserError('the network has SyncBatchNorm, which several processes share on GPUs alone: give it '
                            'BatchNorm here, or start one process')
        images = min(config['batch_size'], config['batch_size'] * config['accumulation_steps'] // world().size)
        if device.type == 'cuda' and images < 4:                       # too few for statistics of their own
            model = timm.layers.convert_sync_batchnorm(model)          # torch's drops BatchNormAct2d's activation
        engine = nn.parallel.DistributedDataParallel(
            model, [device] if device.type == 'cuda' else None, gradient_as_bucket_view=True,
            find_unused_parameters=has_idle_parameters(model))
        engine.broadcast_buffers = False                               # the argument's name differs among versions
    model.train()                                                      # all of it: a part may have come in eval mode
    return TrainState(model, optimizer, build_scaler(precision.dtype, config, device),
                      Parts(model).copy() if config['ema_decay'] else None, precision.dtype, config['batch_size'],
                      engine=engine)


def has_idle_parameters(model):
    """Whether some parameters get no gradient (EfficientNet, DPT, PSPNet): DDP must then look for them in each step."""
    if not isinstance(model, SegmentationModel) or model.is_own:
        return True                                                    # it is unknown what input it takes
    shape = 1, model.config['in_channels'], *model.config['image_size']
    images = torch.zeros(shape, dtype=getattr(torch, model.config['image_dtype']), device=model.mean.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    return any(grad is None for grad in torch.autograd.grad(model.eval()(images).sum(), trained, allow_unused=True))


def build_scaler(dtype, config, device):
    """A gradient scaler that works for float16 and does nothing for the rest."""
    return torch.amp.GradScaler(device.type, enabled=dtype == 'float16', **{key: config[key] for key in SCALING})


def load_batches(dataset, batches, config, device):
    """Batches of these rows (arrays of indices), as in training. A user's data set is read by a worker, if there are
    any: a file that it opens at its first sample, if opened here, would be shared by all workers forked later."""
    workers = min(1, config['num_workers']) if isinstance(dataset, Plain) else 0
    config, rows = config | {'num_workers': workers}, [batch.tolist() for batch in batches]
    with served_by(build_loader(dataset, config, device, batch_sampler=rows)) as loader:
        return [*loader]


@contextlib.contextmanager
def served_by(loader):
    """A loader whose workers end with the block, for what does not start them again. UserError where they die."""
    try:
        yield loader
    except (RuntimeError, AttributeError, TypeError, EOFError, OSError, pickle.PicklingError) as error:
        if not loader.num_workers or not (workers_failed(error) or re.search('pickle|local object', str(error))):
            raise
        raise UserError([in_words(error), advice_on_workers(error)], 'the data workers die') from error
    finally:
        stop_workers(loader)


def workers_failed(error):
    """Whether an error tells that data workers died, hang or cannot be started, for want of memory, processes or open
    files."""
    return isinstance(error, (EOFError, ConnectionError)) or isinstance(error, RuntimeError) and re.search(
        r'DataLoader (worker \(|timed out)|^Too many open files|items of ancdata', str(error)) or \
        getattr(error, 'errno', None) in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)


def advice_on_workers(error):
    """What to type where data workers die."""
    if sys.platform == 'linux' or isinstance(error, MemoryError):
        return 'too little memory? fewer num_workers, and cache_images=False, need less'
    return "workers import what they need anew here: keep Datasets in a .py file, without lambdas or open files, and " \
        "what trains below  if __name__ == '__main__':, or type num_workers=0"


def smoke_test(state, loader, val_loader, loss_fn, config, run, resumed):
    """One window, one validation batch, a checkpoint written and read back: what would fail in hour three fails now.
    torch.compile (in place: state_dict keys stay) is believed only after this. Afterwards the state is as it was, but
    for a precision and a micro-batch that were found to work. `resumed`: as for Run.save.
    Raises UserError where the disk, a batch or memory fails."""
    if not run.save(state, config, resumed):
        raise UserError(f'{run.folder}: a checkpoint could not be written: {run.trouble}')
    sampler = loader.batch_sampler
    first, last = sampler.windows()[0], sampler.windows()[-1]
    is_lonely = min(from_all(min(map(len, sampler.micro_batches(last))))) == 1         # BatchNorm may refuse that
    probed = [first, last] if is_lonely and len(last) != len(first) else [first]
    probes = [load_batches(loader.dataset, sampler.micro_batches(rows), config, state.device) for rows in probed]
    rows = np.arange(min(len(val_loader.dataset), val_loader.batch_size))
    batches = load_batches(val_loader.dataset, [rows], config, state.device)
    if type(loss_fn) is not SegmentationLoss and getattr(loader.dataset, 'ignores', False):
        for batch in itertools.chain(*probes):                         # what fails at that fails now
            batch['mask'][:, 0] = IGNORE
    started, fault, causes, reached = time.monotonic(), '', [], set()
    watched = loss_fn if type(loss_fn) is SegmentationLoss else watching(loss_fn, reached)
    replays = config['compile_model'] and can_replay(state, loss_fn, config)
    if config['compile_model']:
        log.info('Compiling: the first step can take minutes (compile_model=False skips this)')
        forget_compiled(state.model)                                   # and all that were compiled before
        try_to_compile(state, loss_fn, config)
        if world().size > 1:
            agree_on_compiling(state, probes[0][0], loss_fn, config)
    while True:
        try:
            results = []
            for window in probes + ([probes[0]] * 2 if replays else []):       # CUDA graphs are made after a first step
                with compiles_nothing(state.model, is_odd=window is not probes[0]):
                    results.append(guarded_step(state, window, watched, config, True, window is not probes[0]))
            refuse_unshared(results)
            with state.evaluated() as model:
                evaluate_model(model, batches, loss_fn, state.dtype)
            break
        except Rewind as rewind:
            go_back(state, config, run, **rewind.changes)
            record(state, rewind.event)
        except (RuntimeError, TypeError, AssertionError) as error:     # not every operation takes 16 bits, nor NumPy
            causes = causes or [error]
            lower = '' if 'device-side' in str(error) else safer_dtype(state.dtype, state.device)      # the GPU is lost
            if world().size > 1 or not lower:
                raise causes.pop()                                     # not of the precision; nor held by this frame
            traceback.clear_frames(error.__traceback__)                # they hold the tensors of the step
            fault = f'a step fails in {state.dtype} ({in_words(error)}): precision {state.dtype} -> {lower}'
            go_back(state, config, run, dtype=lower)
    causes.clear()                                                     # its frames hold the batches
    if fault:                                                          # of the precision, for the safer one works
        record(state, fault)
    if outside := reached - {*state.model.parameters()}:
        warn(f'loss_fn: reaches {counted(len(outside), "parameter")} outside of the model, which are not trained '
             'here: make weights of the loss a part of the model; let a teacher run under torch.no_grad()')
    if state.device.type == 'cuda':                                    # peaks of earlier runs and of cuDNN's search
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(state.device)
    if is_compiled(state.model):
        log.info('Compiled in %.0f s', time.monotonic() - started)
    go_back(state, config, run)                                        # but for what was found to work
    run.saved_at = place_of(state)                                     # of a trial alone nothing is to be saved


def watching(loss_fn, reached):
    """A user's loss_fn, which adds to the set `reached` all parameters that its losses depend on."""
    def watched(model, batch):
        answer = loss_fn(model, batch)
        nodes, seen = [getattr(answer[0] if isinstance(answer, tuple) else answer, 'grad_fn', None)], {None}
        for node in filter(None, nodes):                               # which grow on the way
            following = {other for other, _ in node.next_functions} - seen
            seen |= following
            nodes += following
            if isinstance(getattr(node, 'variable', None), nn.Parameter):
                reached.add(node.variable)
        return answer
    return watched


def refuse_unshared(results):
    """UserError where the processes have gradients of their own after a step: each would train a network of its own."""
    for norms in zip(*from_all([float(result.norm) for result in results])):
        if max(norms) - min(norms) > 1e-3 * max(norms):
            raise UserError('loss_fn: several processes exchange the gradients of what it calls as model(...) alone, '
                            'not those of methods and parts of the model: let its forward call these')


def is_criterion(loss_fn):
    """Whether a loss is of a library, or by its first parameter's name of the same form: (logits, target)."""
    theirs = 'torch.nn.functional', 'torch.nn.modules.loss', 'segmentation_models_pytorch.losses', 'monai.losses'
    if (getattr(loss_fn, '__module__', '') or '').startswith(theirs):
        return True
    asked = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    with contextlib.suppress(ValueError, TypeError, NameError):        # no signature; its types are not there (3.14)
        first = str(next(iter(inspect.signature(asked).parameters.values()), '')).partition(':')[0]
        return first in 'logits pred preds prediction predictions y_pred y_hat output outputs net_output input ' \
                        'inputs x y_true target targets'.split()
    return False


def check_own(model, loss_fn, train_data, val_data):
    """UserError for a network, a loss or data sets of the user's that train cannot use."""
    own = {'model': model, 'train_data': train_data, 'val_data': val_data, 'loss_fn': loss_fn}
    missing = [name for name, value in own.items() if value is None]
    if missing and (train_data is not None or val_data is not None):
        raise UserError(f'give {" and ".join(missing)} too: data sets of your own come with a network and a loss')
    if model is not None and not isinstance(model, nn.Module):
        raise UserError(f'model={shown(model)}: must be a network (nn.Module); architecture=NAME names one of smp')
    kind = type(model)
    if (kind.__module__, kind.__name__) == (__name__, 'SegmentationModel') and kind is not SegmentationModel:
        raise UserError('model: is of train_unet as it was before importlib.reload, and would normalise twice: give '
                        'train_unet.load(result.run_dir)')
    for name, data in (('train_data', train_data), ('val_data', val_data)):
        is_map = hasattr(data, '__getitem__') and hasattr(data, '__len__') \
            and not isinstance(data, (str, torch.utils.data.IterableDataset))
        if data is not None and not (is_map and len(data)):
            raise UserError(f'{name}: must be a map-style Dataset (with len() and [index]) that is not empty; of a '
                            'DataLoader give its .dataset, of a folder data=PATH alone')
    part = "lambda model, batch: loss(model(batch['x']), batch['y']).flatten(1).mean(1), with reduction='none'"
    aside = ''
    if (getattr(loss_fn, '__module__', '') or '').startswith('segmentation_models'):   # they give the mean of a batch
        part = "lambda model, batch: loss(model(batch['x']), batch['y']).expand(len(batch['y']))"
    if train_data is None:
        part = "lambda model, batch: loss(model(batch['image']), batch['mask'].long()).expand(len(batch['mask']))"
        aside = " (of two classes, and for MONAI's losses, batch['mask'][:, None].float(); what is ignored is 255)"
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn) or is_criterion(loss_fn)):
        raise UserError(f'loss_fn={shown(loss_fn)}: is asked as loss_fn(model, batch) for one loss per sample; make it '
                        f'a part of one{aside}: {part}')
    known = set(model.parameters()) if model is not None else set()
    if isinstance(loss_fn, nn.Module) and {p for p in loss_fn.parameters() if p.requires_grad} - known:
        raise UserError('loss_fn: has weights of its own, which would not be trained; make it a part of the model')


ONE_TRAINING = threading.Lock()
TRAINED = weakref.WeakSet()        # networks given to train() before


@contextlib.contextmanager
def usual_settings():
    """torch as it is by itself, whatever a notebook has set: gradients off, another default device or type (which
    DataLoader or some network does not take), or an open autocast, which keeps its copies of the weights to its end.
    Afterwards all is as it was found, as if nothing had been drawn; of TF32 and the current GPU the last
    setting stays."""
    is_open = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    with contextlib.ExitStack() as settings, torch.inference_mode(False), torch.enable_grad():
        settings.callback(set_random_states, random_states())
        settings.callback(setattr, torch.backends.cudnn, 'benchmark', torch.backends.cudnn.benchmark)
        settings.enter_context(pillow_as_it_was())
        mode = torch.get_deterministic_debug_mode()
        settings.callback(lambda: torch.get_deterministic_debug_mode() == mode         # the compiler's switch too
                          or torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1))
        settings.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if is_open:
            for kind in ('cpu', choose_device('auto').type):
                settings.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        if torch.empty(0).device.type != 'cpu':                        # else it would cost time in each call
            settings.enter_context(torch.device('cpu'))
        try:
            yield
        except (UserError, KeyboardInterrupt) as error:                # see train
            error.__context__ = None
            traceback.clear_frames(error.__traceback__)
            raise


def train(preset=None, *, model=None, loss_fn=None, train_data=None, val_data=None, **overrides):
    """Train -> Result. Settings are those of CONFIG: train(preset='fast', data='PATH', num_epochs=5).

    A network of your own, model=NET, is given normalised float32 images (B, C, H, W) and gives logits (B, K, H, W), K
    being 1 for two classes. Data sets and a loss of your own run in the same loop: give model, train_data, val_data
    (map-style Datasets; a collate_fn of theirs is used) and loss_fn(model, batch) -> (B,) losses per sample (the mean
    of a batch as loss.expand(B)), or (losses, counts), the confusion matrix (K, K) that IoU and Dice are computed from;
    settings of data, network and loss then have no effect. What the loss calls as model(...) runs in the precision at
    work; methods and parts of the model that it calls itself run in float32. Each epoch begins with the whole model in
    train mode: a part that stays in eval mode, such as frozen norms, overrides its train(). Raises UserError for what
    you can mend, TrainingDiverged if no precision gives finite numbers.
    """
    if getattr(multiprocessing.current_process(), '_inheriting', False):       # spawn imports the script anew
        raise UserError("a data worker runs your script from its beginning: put what trains below "
                        "if __name__ == '__main__':")
    check_own(model, loss_fn, train_data, val_data)
    if not ONE_TRAINING.acquire(blocking=False):                       # random states and signals are the process's
        raise UserError('another training is at work in this process; give each a process of its own')
    run, is_new = None, False
    try:
        config, sources, notes = resolve_config(preset, overrides)
        if train_data is not None:
            config['data'] = OWN_DATA
        folder = find_resume(config, sources['num_epochs'] != 'default')       # each process, before any may write
        if folder:
            config, sources, notes = resume_config(folder, preset, overrides)
        if train_data is None:
            refuse_own_data(config, folder or preset)
        forget_shown()
        device = join_processes(config)
        refuse_differences(config, folder)
        config['resume'] = str(folder) if folder else None
        data = Path(os.path.realpath(os.path.expanduser(config['data'])))      # a folder has no suffix: survey 2024.06
        name = 'run' if train_data is not None else data.name if data.is_dir() else data.stem
        is_new = not folder and (config['run_dir'] == 'auto' or not os.path.exists(config['run_dir']))
        folder = folder or from_first(lambda: choose_run_dir(config, name))
        with Run(folder) as run, usual_settings():
            result = run_training(config, sources, notes, run, device, model, loss_fn, train_data, val_data)
        atexit.register(leave_processes)                               # does nothing if this is the only one
        return result
    except (UserError, KeyboardInterrupt) as error:
        atexit.unregister(meet_late)                                   # of a try before
        if isinstance(error, UserError) and __name__ != '__main__':    # else main does it
            atexit.register(meet_late)
        error.__context__ = None                                       # a notebook keeps the last error, and with its
        traceback.clear_frames(error.__traceback__)                    # frames a network on the GPU
        raise
    finally:
        ONE_TRAINING.release()                                         # first: a Ctrl-C in these lines must not keep it
        error = sys.exc_info()[1]                                      # SystemExit (SIGTERM): the job may go on
        is_lost = world().size > 1 and re.search(GONE, str(error))             # another process has ended, not this
        is_mistake = isinstance(error, (KeyboardInterrupt, Exception)) and not is_lost
        error = None                                                   # else it and this frame hold each other
        with contextlib.suppress(OSError):                             # a drive that is gone
            is_unused = is_mistake and run and not (run.begun or config['resume'] or [*run.folder.glob('b*.pt')])
            if is_unused and is_new:
                shutil.rmtree(run.folder, ignore_errors=True)          # nothing was begun: leave no trace
            if is_unused and run.saved_at:
                for path in checkpoints(run.folder):
                    path.unlink(missing_ok=True)                       # or the next try is refused
        if torch.cuda.is_initialized() and world().size == 1:          # of several one may have died: it would hang
            gc.collect()                                               # imports during the run leave cycles of frames
            with contextlib.suppress(RuntimeError):                    # a failed assertion ends all work on a GPU
                torch.cuda.empty_cache()


def run_training(config, sources, notes, run, device, model, loss_fn, train_data, val_data):
    """From an unsettled config to a Result, in a run folder that is locked already."""
    own_data, resuming, run.own_loss = train_data is not None, config['resume'] is not None, loss_fn is not None
    given = [] if model is None else [model]
    run.wishes = {key: config[key] for key in ('cache_images', 'num_workers')}     # a resume may be on another machine
    goes_on = config['initial_weights'] or isinstance(model, SegmentationModel) and not own_data
    if not resuming:
        refuse_used(run.folder)
    with as_learnt(config) if resuming else contextlib.nullcontext():
        config, hardware, precision, data, why = prepare(config, sources, device, own_data=own_data)
    config |= {'run_dir': str(run.folder), 'resume': None, 'data': OWN_DATA if own_data else absolute(config['data']),
               'initial_weights': absolute(config['initial_weights'])}
    if config['tensorboard']:
        run.open_board()
    if config['deterministic']:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')    # cuBLAS asks for it
        torch.use_deterministic_algorithms(True, warn_only=True)       # repeatable GPU kernels, where there are any
    apply_tf32(config['tf32_matmul_precision'])
    if not own_data:
        settle_for_own(model, loss_fn, config, sources, why)
        train_data, val_data, loss_fn = build_datasets(config, sources, why, data, model, loss_fn)
    if not resuming and TRAINED.intersection(given):
        warn('model: begins where an earlier training left it; for another fold, or afresh, build it anew')
    tell_precision(precision, hardware, notes)
    config |= amp_settings(precision.dtype)
    seed_everything(config['seed'])
    warn_of_held_parts(model)
    in_last = {'encoder_weights': None, 'initial_weights': None} if resuming else {}       # last.pt has the weights
    model = choose_model(model, config | in_last, data)
    run.is_own = own_data or model.is_own or run.own_loss
    warn_of_size(model, precision)
    state = build_state(model, config, precision, device, data.sizes if data is not None else ())
    if own_data:
        train_data, val_data = Plain(train_data, config['seed']), Plain(val_data, config['seed'])
    loader, val_loader = build_loaders(train_data, val_data, config, device)
    state.images = images = hash_images(train_data, val_data) + ('' if own_data else hash_contents(data, config))
    refuse_other_files(None if own_data else data.pairs, images)
    resumed = resume_state(state, run, config, precision, hardware, sources) if resuming else None
    if not resuming and goes_on and type(loss_fn) is SegmentationLoss and last_bias(model) is not None:
        rows = split_evenly(np.concatenate(loader.batch_sampler.windows())[:16], config['batch_size'])
        match_shares(state, load_batches(train_data, rows, config, device))
    if config['compile_model']:
        run.after.callback(forget_compiled, state.model)               # also after a fault
    run.undo = functools.partial(go_back, state, config, run) if given else None
    smoke_test(state, loader, val_loader, loss_fn, config, run, resumed)
    state.images = images                                              # a resume that is told of others had begun
    if state.epoch < config['num_epochs']:                             # else these settings train nothing
        run.write('config.py', config_text(config | run.wishes))       # what was left to this machine stays 'auto'
        is_same = resumed and resumed['images'] == images and {sources[key] for key in DATA_KEYS} == {'default'}
        if not own_data and not (is_same and (run.folder / 'split.csv').exists()):     # its lines may be edited by now
            run.write('split.csv', split_csv(data.pairs))
    run.begun = True
    TRAINED.update(given)
    try:
        fit(state, loader, val_loader, loss_fn, config, run)
    finally:
        stop_workers(loader, val_loader)                               # a signal to the whole job kills them too
        if state.history:                                              # with events since the last epoch
            run.write('history.csv', history_csv(state.history))
    return finish(state, val_data, config, run)


def build_datasets(config, sources, why, data, model, loss_fn):
    """The images that train and validate, told, and the loss on them -> (train_data, val_data, loss_fn). Settles what
    follows from the pixels (mean and std) in the config."""
    why |= settle_statistics(config, SegmentationDataset(data, 'train', config, is_training=False), model)
    train_data = SegmentationDataset(data, 'train', config, is_training=True)
    val_data = SegmentationDataset(data, 'val', config, is_training=False)
    if os.path.isfile(config['augment']):
        config['augment'] = absolute(config['augment'])                # config.py may be used from elsewhere
    tell_data(data, config, sources, why)
    from_first(lambda: tell_detail(val_data))
    if loss_fn is not None and train_data.ignores:
        warn("loss_fn: batch['mask'] is 255 where pixels are ignored, around a turned image and in a broken one: "
             'leave them out')
    return train_data, val_data, loss_fn or SegmentationLoss(config, build_class_weights(config, data))


def build_loaders(train_data, val_data, config, device):
    """This process's share of the data -> (loader of training batches, by windows; loader of validation batches)."""
    rank, count = world()
    if len(train_data) < count:
        raise UserError(f'{counted(len(train_data), "training image")} for {count} processes: start fewer')
    loader = build_loader(train_data, config, device,
                          batch_sampler=WindowSampler(len(train_data), config, rank, count,
                                                      getattr(train_data, 'rarity', None)))
    at_once = config['batch_size'] if getattr(val_data, 'is_resized', True) else 1         # else sizes differ
    val_loader = build_loader(val_data, {**config, 'num_workers': min(4, config['num_workers'])}, device,
                              sampler=range(rank, len(val_data), count),     # sharded without padding
                              batch_size=at_once)
    return loader, val_loader


def refuse_used(folder):
    """UserError for a folder in which a new run would write over another one, or over files that are of no run."""
    if checkpoints(folder):
        raise UserError(f'{folder}: holds a run already; {as_typed("resume", folder)} continues it, another run_dir '
                        'starts afresh')
    settings = folder / 'config.py'
    is_run = settings.is_file() and settings.read_bytes().startswith(HEADING.encode())
    for name in ['best.pt'] if is_run else ['best.pt', 'config.py', 'split.csv', 'history.csv']:
        if (folder / name).exists():                                   # of a run without its last.pt, or of no run
            raise UserError(f'{folder / name}: would be overwritten, and there is no last.pt to go on from; choose '
                            'another run_dir')


def refuse_data(config):
    """UserError for a run_dir that is the folder of the data, or one of its folders with images: list_files skips run
    folders, so those images would be lost to later runs."""
    folder, data = (Path(os.path.realpath(os.path.expanduser(config[key]))) for key in ('run_dir', 'data'))
    if folder.is_relative_to(data) and not (folder / 'log.txt').exists():      # else a run drew its pictures
        names = (name for _, _, names in os.walk(folder) for name in names if may_be_read(name))
        if name := next(names, None):
            raise UserError(f'{folder}: holds data, such as {name}; a run wants a folder of its own: choose another '
                            'run_dir')


def choose_model(model, config, data):
    """The config's network or the user's, with our preprocessing; without (data=None) if the data are the user's."""
    if model is not None and config['initial_weights']:
        raise UserError('initial_weights: starts a network that CONFIG names; give your own with its weights')
    if data is None:
        refuse_lazy(model)
        convert_weights(model)
        keep_float32(model, config['keep_float32'])
        return model
    given, goes_on = model, isinstance(model, SegmentationModel)       # of an earlier run: a second stage
    model = build_model(config, given.network if goes_on else given)
    if goes_on:
        model.is_own = given.is_own or any(given.config[key] != config[key] for key in ('in_channels', 'num_classes'))
    if given is None:
        begin_at_share(model, data)
    if config['initial_weights']:                                      # then no network was given, see above
        take_initial(model, config)
    model.pixels, model.coding, model.side = find_image_dtype(data), data.coding.words, max(map(max, data.sizes))
    return model


def made_by(value):
    """'albumentations' or 'monai' if the class of a value, or a base of it, is defined there; else ''."""
    packages = [kind.__module__.partition('.')[0] for kind in type(value).__mro__]
    return next((name for name in packages if name in ('albumentations', 'monai')), '')


@contextlib.contextmanager
def naming(what, advice=''):
    """Make what a user's data set or pipeline raises a DataError that says of what. what(): in words."""
    try:
        yield
    except Exception as error:                                         # whatever it is, it is their code's
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        if re.search('</?torch_', str(error)):                         # default_collate puts a batch there
            advice = '; too little shared memory: type fewer num_workers, or docker run --shm-size=8g'
        at = traceback.extract_tb(error.__traceback__)[-1]             # of a worker only the message comes through
        raise DataError(f'{what()}: {in_words(error)}{advice or f" ({at.filename}, line {at.lineno})"}') from error


class Plain(torch.utils.data.Dataset):
    """A user's map-style data set, read by the keys that our own takes: (epoch, index), or index in validation. Key and
    seed decide what a sample draws at random, and what collate_fn draws after the last one."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed
        parts = [dataset]                                              # and all inside of a Subset or ConcatDataset
        for part in parts:
            parts += getattr(part, 'datasets', []) if isinstance(part, torch.utils.data.ConcatDataset) else \
                [part.dataset] if isinstance(part, torch.utils.data.Subset) else []
        self.join = next((part.collate_fn for part in parts if getattr(part, 'collate_fn', None)),
                         torch.utils.data.default_collate)
        values = [value for part in parts for value in getattr(part, '__dict__', {}).values()]
        values += [inner for value in values if isinstance(value, (dict, list, tuple)) and len(value) <= 100
                   for inner in (value.values() if isinstance(value, dict) else value)]    # {'train': ..., 'val': ...}
        self.transforms = [value for value in values if made_by(value) and hasattr(value, 'set_random_state')]

    def __len__(self):
        return len(self.dataset)

    def name(self, index):
        """What messages call a sample."""
        return f'sample {index}'

    def __getitems__(self, keys):
        """The batch of these keys, as a DataLoader asks for it. Each sample has a seed of its own, which is left set:
        Run.wait_for puts the random states back."""
        samples = []
        for key in keys:
            epoch, index = key if isinstance(key, tuple) else (0, key)
            seed = seed_of(self.seed, epoch, index)
            random.seed(seed)
            np.random.seed(seed)
            # while CUDA is not initialised torch.manual_seed formats a stack trace at each call
            seed_torch = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
            seed_torch(seed)
            two = np.random.default_rng(seed), random.Random(seed)     # shared, or all transforms draw the same
            for number, transform in enumerate(self.transforms):       # they ignore the global generators
                given = [seed_of(seed, number)] if made_by(transform) == 'monai' else two
                transform.set_random_state(*given)
            with naming(lambda: self.name(index)):
                sample = self.dataset[index]
            samples.append(dict(sample) if isinstance(sample, Mapping) else sample)        # transformers' own mappings
        indices = (str(key[1] if isinstance(key, tuple) else key) for key in keys)
        with naming(lambda: f'samples {", ".join(shorten(indices, 4))} make no batch', ': let each give tensors, '
                    'arrays or numbers of one shape, or give the Dataset a collate_fn(samples)'):
            batch = self.join(samples)                                 # draws on from the last sample's seed
        return batch.data if isinstance(batch, UserDict) else batch    # transformers' too: pytree sees a leaf in it


def hash_images(*datasets):
    """A hash of the names and sizes of all images, in order; of a user's data set only the number is known."""
    names = [[(os.path.basename(path), os.path.getsize(path)) for path in map(data.name, range(len(data)))]
             if isinstance(data, SegmentationDataset) else len(data) for data in datasets]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def refuse_other_files(pairs, images):
    """UserError unless all processes read the same files: by `images`, the hashes of state.images, and by the sizes of
    the masks."""
    masks = pairs.masks if pairs and world().size > 1 else ()
    parts = [part for mask in masks for part in os.fsdecode(mask).split(UNITED) if os.path.isfile(part)]
    sizes = json.dumps([*map(os.path.getsize, parts)])
    if len({*from_all(images + hashlib.sha256(sizes.encode()).hexdigest())}) > 1:
        raise UserError('the data are not the same for all processes: use a folder that all machines share, or equal '
                        'copies; Datasets of your own are given whole, for each process takes its share')


def hash_contents(data, config):
    """Hashes of what else decides a result and may be edited: one of the mask values and the augmentation file, and one
    of the images' contents."""
    recipe = Path(config['augment']).read_bytes() if os.path.isfile(config['augment']) else b''
    values = json.dumps(sorted(data.values.items()), default=int).encode()
    return hashlib.sha256(values + recipe).hexdigest() + data.marks


def settle_own(config):
    """The 'auto' settings that matter when the user brings the data."""
    settled = {'num_epochs': 20, 'learning_rate': usual_rate(config)[0], 'ema_decay': None, 'num_workers': 0}
    for key in [key for key in settled if config[key] == 'auto']:
        log.info('%s = %s  (the usual choice for data of your own)', key, settled[key])
    config = {**config, 'progressive_resizing': 0.0}
    return {key: settled.get(key, value) if value == 'auto' else value for key, value in config.items()}


def fit(state, loader, val_loader, loss_fn, config, run):
    """The whole training: epochs of windows, each epoch judged on the validation images, all of it saved on the way."""
    patience, several, deaths = config['early_stopping_patience'] or math.inf, world().size > 1, 0
    took = math.inf                                                    # seconds of the last validation; unknown yet
    while state.epoch < config['num_epochs']:
        if epochs_in_vain(state.history, state.best_epoch, config) >= patience:
            log.info('Early stopping: no better for %s (early_stopping_patience)', counted(patience, 'epoch'))
            break
        try:
            train_epoch(state, loader, loss_fn, config, run)
            if from_first(lambda: several and took > 10 or time.monotonic() - run.last_save > 60):
                run.save(state, config)                                # torchrun kills a process that stops too slowly
            started = time.monotonic()
            metrics = validate(state, val_loader, loss_fn, config, run)
            took = time.monotonic() - started
            close_epoch(state, metrics, config, run, took)
            deaths = 0
            show_epoch(run, state, val_loader.dataset)
            run.agree(state, config)
        except Rewind as rewind:
            go_back(state, config, run, **rewind.changes)
            state.bad = totals_alone(state.bad)
            record(state, rewind.event)
            run.save(state, config)
        except Interrupted:
            break
        except (DataError, OneTooLarge, MemoryError) as error:         # a file is broken, or memory ran out
            end_with_advice(error, state, config, run)
        except (RuntimeError, EOFError, OSError) as error:
            has_died = config['num_workers'] and workers_failed(error)
            is_validating, deaths = state.window == loader.batch_sampler.num_windows, deaths + 1
            if has_died and (deaths > 3 or several and is_validating) or is_out_of_memory(error):
                end_with_advice(error, state, config, run)             # the others would wait in a collective
            if not has_died:
                raise
            stop_workers(loader, val_loader)                           # new ones begin at the next window
            if not run.asked:                                          # else a signal to the job ended them
                words = ' '.join(str(error).split())[:200] or in_words(error)
                log.warning('%s; starting the workers again (%d of 3)', words, deaths)


def end_with_advice(error, state, config, run):
    """Save the state (in a single process), and raise the error with advice on what to type."""
    if isinstance(error, OneTooLarge):
        state.batch_size, run.saved_at = config['batch_size'], None    # it may fit when resumed, with other settings
    if world().size == 1 and run.saved_at != place_of(state):          # a resume that made no step keeps its settings
        run.save(state, config)
    if isinstance(error, UserError):
        raise error
    if isinstance(error, RuntimeError) and is_out_of_memory(error):    # outside of a step: no smaller batch helps
        raise UserError(TOO_LARGE, 'out of memory') from None
    raise UserError([in_words(error), advice_on_workers(error)],
                    'out of memory' if isinstance(error, MemoryError) else 'the data workers die') from None


def stop_workers(*loaders):
    """End the workers, which live on between epochs, even if some were killed; new ones start when needed."""
    for loader in loaders:
        iterator, loader._iterator = loader._iterator, None
        if iterator is not None:
            with contextlib.suppress(RuntimeError):                    # raised if one of them has died
                iterator._shutdown_workers()
            for worker in iterator._workers:                           # one that hangs in a read ignored torch
                worker.kill()


def resume_from(run):
    """As load_last, in all processes. A last.pt that is damaged becomes damaged.pt: the next save would rename it to
    previous.pt, over the one that is whole."""
    saved, path = from_first(lambda: load_last(run.folder))
    if path.name != 'last.pt' and not world().rank:
        with contextlib.suppress(OSError):                             # there may be none
            os.replace(run.folder / 'last.pt', run.folder / 'damaged.pt')
    return saved, path


def go_back(state, config, run, **changes):
    """Back to the last checkpoint, but in what healing arrived at, or `changes`; the history keeps recoveries."""
    history, changes = state.history, {key: getattr(state, key) for key in ('dtype', 'batch_size', 'images')} | changes
    saved, _ = resume_from(run)
    state.scaler = build_scaler(changes['dtype'], config, state.device)
    restore(state, saved)
    run.new_best = None if world().rank else saved.get('unsaved')      # later best epochs are trained again
    state.history += [row for row in history[len(state.history):] if row['event']]
    for key, value in changes.items():
        setattr(state, key, value)


def resume_state(state, run, config, precision, hardware, sources):
    """Continue from last.pt -> what it holds but weights. The precision and the micro-batch that healing arrived at
    come with it, unless their settings were changed, as `sources` tells. UserError for a checkpoint of another run."""
    saved, path = resume_from(run)
    images, changed = state.images, {key for key, origin in sources.items() if origin != 'default'}
    try:
        refuse_nonsense(saved, state, config)
        is_known = saved['dtype'] in {'float32', *hardware.units} or hardware.kind == 'cpu'
        dtype = saved['dtype'] if is_known and not changed & {'use_amp', 'amp_dtype'} else precision.dtype
        state.scaler = build_scaler(dtype, config, state.device)
        if hardware.kind == 'cpu' and 'cuda' not in saved['random'] and saved['threads'] != torch.get_num_threads():
            if saved['threads'] <= num_cores():
                log.info('The run goes on with its %s, for the same results', counted(saved['threads'], 'thread'))
                run.after.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(saved['threads'])                # equal to the bit
            else:
                log.warning('The run used %d threads, more than there are cores for here: results will differ in the '
                            'last bits', saved['threads'])
        restore(state, saved)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        advice = 'give the network that it began with' if run.is_own else \
            'one with a network of your own is resumed from Python, by model=NETWORK'
        raise UserError([f'{path}: does not belong to this run: {in_words(error)}', advice], 'cannot resume') from None
    if saved.get('own_loss') and not run.own_loss:
        raise UserError(f'{path}: was trained by a loss of your own: go on from Python, with it', 'cannot resume')
    if state.images != images[:len(state.images)]:                     # older runs know the images alone
        log.warning('The images, their masks or split, or the augmentation file, are not those this run began with: '
                    'scores before and after do not compare, and images that validate now may have been trained on')
    if dtype != state.dtype:                                           # unsound steps of another precision
        state.bad = totals_alone(state.bad)
    if dtype != precision.dtype:
        log.info('The run goes on in %s, at which healing had arrived', dtype)
    state.dtype = dtype
    state.batch_size = config['batch_size'] if 'batch_size' in changed else min(state.batch_size, config['batch_size'])
    run.new_best = None if world().rank else saved.get('unsaved')      # a best.pt that could not be written
    if state.best_epoch >= 0 and not from_first(lambda: bool(run.new_best) or (run.folder / 'best.pt').exists()):
        log.warning('%s is gone: the best epoch from here on is kept', run.folder / 'best.pt')
        state.best_score = -math.inf
    if ahead := from_first(lambda: best_beyond(run.folder, state.epoch)):
        (state.best_score, state.best_epoch), run.new_best = ahead, None        # what waits is older
    in_vain = epochs_in_vain(state.history, state.best_epoch, config)
    cures = [f'num_epochs={state.epoch + 1} or more'] if state.epoch >= config['num_epochs'] else []
    if in_vain >= (config['early_stopping_patience'] or math.inf):
        cures.append('a larger early_stopping_patience, or None,')
    if cures:
        log.info('%s has ended: %s goes on', path, ' and '.join(cures))
    else:
        log.info('Continuing %s at epoch %d, step %d, with %s at once', path, state.epoch + 1, state.step,
                 counted(state.batch_size, 'image'))
    return {key: value for key, value in saved.items() if key not in ('model', 'optimizer', 'average', 'weights')}


def best_beyond(folder, epoch):
    """(score, epoch) of a best.pt that is ahead of last.pt, as where a full disk took the smaller file alone; worse
    epochs do not replace it. None if it is not."""
    with contextlib.suppress(OSError, LookupError, TypeError):
        best = load_checkpoint(folder / 'best.pt')
        return (score_of(best['metrics']), best['epoch'] - 1) if best['epoch'] > epoch else None


def refuse_nonsense(saved, state, config):
    """Raise TypeError, LookupError or ValueError for a checkpoint that no training could have written."""
    for name in TrainState.PLAIN:
        if type(saved[name]) is not type(getattr(state, name)):
            raise TypeError(f'{name}={shown(saved[name])}')
    epochs_in_vain(saved['history'], saved['best_epoch'], config)      # fails for rows without their keys
    if min(saved['epoch'], saved['window'], saved['step'], saved['batch_size'] - 1) < 0 \
            or saved['dtype'] not in ('float32', 'bfloat16', 'float16') \
            or not 0 <= saved['random']['numpy'][2] <= 624:            # NumPy would read beyond its memory
        raise ValueError('its counters make no sense')


OWN_DATA = '(data sets given to train)'
HEADING = '"""The settings of one run.'


def config_text(config):
    """The resolved config in the form of a preset."""
    settings = {key: value for key, value in config.items() if key not in ('run_dir', 'resume')}
    return f'{HEADING} Repeat it with: python train_unet.py --preset PATH_OF_THIS_FILE"""\n' \
           f'config = {pprint.pformat(settings, sort_dicts=False, width=110)}\n'


def split_csv(pairs):
    """Which image is on which side of the split, as a list file (one that united masks cannot be read from)."""
    text = io.StringIO()
    paths = ([clean(os.path.abspath(os.fsdecode(path))) for path in side] for side in (pairs.images, pairs.masks))
    csv.writer(text).writerows([('image', 'mask', 'split'), *zip(*paths, (SPLITS[split] for split in pairs.splits))])
    return text.getvalue()


def tell_data(data, config, sources, why):
    """What was asked for, what was found, and every setting that was decided for the user."""
    asked = [key for key in config if key == 'data' or sources[key] != 'default' and key not in ('run_dir', 'resume')]
    log.info('settings: %s', ' '.join(as_typed(key, config[key]) for key in asked))
    for line in describe_data(data, config):
        log.info('%s', line)
    for key, reason in why.items():
        log.info('%s = %s  (%s)', key, config[key], reason)
    several, effective = world().size, config['batch_size'] * config['accumulation_steps']
    passes, count = math.ceil(effective // several / config['batch_size']), len(data.pairs.rows('train'))
    log.info('batch: %s at once x %d%s = effective batch %d%s',
             counted(math.ceil(effective // several / passes), 'image'), passes,
             f' x {several} processes' if several > 1 else '', effective,
             f', more than the {count} training images: these make one step' if count < effective else '')


def tell_detail(dataset):
    """Say what score the masks themselves have, of up to 20 images, once brought to image_size and back. Nothing where
    images are not resized, or have no foreground."""
    classes = dataset.config['num_classes']
    if not dataset.is_resized:
        return
    counts = torch.zeros(classes, classes, dtype=torch.long)
    rows = np.linspace(0, len(dataset) - 1, min(20, len(dataset))).astype(int).tolist()
    for (_, truth), _ in read_all(dataset, rows, dataset.config['skip_broken']):
        if counts.sum() * classes > 2**28:                             # a few seconds: enough of large images
            break
        small = torch.from_numpy(resize(truth, dataset.height, dataset.width, is_mask=True)).long().clamp(max=classes)
        logits = F.one_hot(small, classes + 1)[..., :classes].permute(2, 0, 1).float()     # ignored: none of them
        ids = decide(logits if classes > 2 else logits[1:] - logits[:1], truth.shape)
        counts += confusion_matrix(ids, torch.from_numpy(truth), classes)
    if (iou := compute_metrics(counts)['iou']) < 0.995:
        is_low = iou <= 0.8
        log.log(logging.WARNING if is_low else logging.INFO, 'resized to %d x %d the masks themselves would score IoU '
                '%.3f%s', dataset.width, dataset.height, iou,
                '; a larger image_size, or size_policy=crop, keeps more' * is_low)


def tell_precision(precision, hardware, notes):
    """Log the hardware, the precision with its reason, TF32, and notes of other settings."""
    what = {'float32': 'off (float32)', 'float16': 'float16, with gradient scaler'}.get(precision.dtype, 'bfloat16')
    log.info('Hardware: %s', hardware.describe())
    log.info('Mixed precision: %s, because %s', what, precision.reason)
    has_effect = 'tf32' in hardware.units or works_on_cpu(precision.tf32, hardware)
    log.info('Float32 itself: tf32_matmul_precision=%s%s', precision.tf32,
             '' if has_effect else ' (no effect: no TF32 here)')
    warn(*precision.warnings, *notes)


def warn_of_held_parts(model):
    """Say that parts of a given network (or None) are trained although they came in eval mode, as frozen norms do."""
    if model is None or not model.training:                            # as a whole in eval mode: load() gives it so
        return
    held = [module for module in model.modules() if not module.training]
    try:
        model.train()
    except NotImplementedError as error:                               # of torch.export
        raise UserError(f'model: cannot be trained ({in_words(error)}): give the network that it was made of') from None
    if any(module.training for module in held):
        warn('the network came with parts in eval mode, which run in train mode like the rest, so that norms follow '
             'these images: its train() can keep them')


def warn_of_size(model, precision):
    """Tell the size of a network, and warn if it is too large for float16, or has no parts to be recomputed."""
    size = sum(p.numel() for p in model.parameters())
    log.info('Network: %s, %.2f million parameters', network_name(model), size / 1e6)
    if precision.dtype == 'float16' and size > VERY_LARGE:
        warn(f'float16 with {size / 1e6:.0f} million parameters: activations of very large networks overflow 65,504 '
             'easily; bfloat16 or float32 is safer')
    saves = isinstance(model, SegmentationModel) and model.config['activation_checkpointing']
    if saves and not any(isinstance(module, Checkpointed) for module in model.modules()):
        warn('activation_checkpointing: no effect, the network has no blocks of several layers to recompute')


def amp_settings(dtype):
    """The settings that ask for a dtype."""
    is_mixed = dtype != 'float32'
    return {'use_amp': is_mixed, 'amp_dtype': dtype if is_mixed else 'auto'}


def take_best(model, config, run):
    """Give the model the weights of best.pt and tell their scores -> scores and epoch; {} if none fits."""
    path = run.folder / 'best.pt'
    try:
        is_ours = lambda: path.exists() and not run.other_holder()
        saved = from_first(lambda: run.new_best or (load_checkpoint(path) if is_ours() else None))
        if not saved:
            return {}
        tell_best(saved['metrics'], saved['epoch'], config)
        shapes = [{name: getattr(value, 'shape', None) for name, value in weights.items()}
                  for weights in (saved['weights'], model.state_dict())]
        if shapes[0] != shapes[1]:                                     # load_state_dict would take those that fit
            raise ValueError('its weights are of another network')
        if isinstance(model, SegmentationModel):                       # as load has it
            model.threshold = saved['threshold']
            model.config |= {key: saved['config'][key] for key in ('use_amp', 'amp_dtype')}
        model.load_state_dict(saved['weights'])
        return saved['metrics'] | {'epoch': saved['epoch']}
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        log.warning('best.pt: %s; the last weights are returned instead', in_words(error))
        return {}


def is_trivial(metrics):
    """Whether a score is hardly above that of one class everywhere: not over twice it, nor a twentieth nearer to 1."""
    constant = metrics.get('constant_iou', 0)
    return 0 < constant < 1 and metrics['iou'] <= constant + min(constant, 0.05 * (1 - constant))


def warn_if_trivial(metrics, config, run=None):
    """Say what to look at where next to nothing was learnt, or found in the data of others by a `run`."""
    if is_trivial(metrics):
        is_left = config['data'] != OWN_DATA and config['loss'] != 'dice' and not wished_weights(config)
        weights = 'class_weights=auto (rare foreground), ' * is_left
        advice = f'More epochs, {weights}a larger image_size or a lower learning_rate may help; do the masks lie on ' \
                 'their images (see samples.png of check)?'
        if run:
            advice = 'The run may not know such images, or their masks may mean something else. A training on them ' \
                     f'can begin with its weights: {as_typed("initial_weights", Path(run))}'
        warn(f'IoU {metrics["iou"]:.4f} is not, or hardly, better than that of the same class everywhere, '
             f'{metrics["constant_iou"]:.4f}. {advice}')


def warn_if_lost(best, history):
    """Say so where the last epoch scores less than half of the best one."""
    last = next((row['val_iou'] for row in reversed(history) if row.get('val_iou') is not None), math.nan)
    if last < best.get('iou', 0) / 2:
        warn(f'the last epoch has IoU {last:.4f}: what was learnt by epoch {best["epoch"]} was lost again (best.pt '
             'has it)')


def tell_best(best, epoch, config):
    """The scores of the best epoch, of each class where there are more than two."""
    scores = [('validation IoU', 'iou'), ('Dice', 'dice')] if 'iou' in best else [('loss', 'loss')]
    log.info('Best: epoch %d, %s', epoch, ', '.join(f'{name} {best[key]:.4f}' for name, key in scores))
    if len(ious := best.get('iou_per_class', [])) > 2:                 # a loss of your own may count other classes
        fits = len(config['class_names'] or ()) == len(ious)
        names = class_names(config if fits else {'class_names': None}, len(ious))
        for name, iou, dice in zip(names, ious, best['dice_per_class']):
            log.info('    %-18s IoU %.3f  Dice %.3f', name, iou, dice)
    warn_if_trivial(best, config)


def tell_end(state, run, is_saved, can_evaluate):
    """The last lines: what was left out, where everything is, and what to type next."""
    for line in shorten(f'left out {counted(times, "time")}, because it or its mask could not be read: {name}'
                        for name, times in state.left_out.items()):
        log.warning('%s', line)
    files = ('best.pt', 'last.pt', 'config.py', 'split.csv', 'history.csv', 'curves.png', 'samples.png', 'log.txt')
    there = [name for name in files if os.path.exists(run.folder / name)]
    log.info('Everything is in %s: %s', run.folder, ', '.join(there))
    if not is_saved:
        log.warning('The newest weights are NOT there: %s. What is in %s is older; mended? It goes on with:  %s',
                    run.trouble, run.folder, run.how_to_resume())
    if run.asked:
        continued = f' Continue with:  {run.how_to_resume()}' if 'last.pt' in there else ''
        log.info('Stopped by %s.%s', signal.Signals(run.asked).name, continued)
    elif can_evaluate and 'best.pt' in there:
        log.info('Next:  %s', command_line('evaluate', quoted(run.folder)))


def finish(state, val_data, config, run):
    """Everything saved, the best weights back, the pictures, and what to type next -> Result."""
    run.asked = max(from_all(run.asked))                               # all processes return the same signal
    is_there = from_first(lambda: run.saved_at == place_of(state) and os.path.exists(run.folder / 'last.pt'))
    is_saved, model = is_there or run.save(state, config), state.model
    if state.average is not None:
        state.exchange()                                               # the last weights, should best.pt not be there
    model.zero_grad()                                                  # as much memory as the weights
    best = take_best(model, config, run)
    warn_if_lost(best, state.history)
    if config['compile_model']:                                        # each number of images would be compiled anew
        forget_compiled(model)
    model.train()                                                      # see TrainState.evaluated
    model.eval()
    if not (world().rank or run.other_holder()):
        try:
            draw_curves(state.history, run.folder / 'curves.png')
            if isinstance(val_data, SegmentationDataset) and not run.asked:
                draw_samples(model, val_data, run.folder / 'samples.png', state.dtype)
        except (OSError, ImportError, ValueError, RuntimeError, MemoryError, UserError) as error:  # broken matplotlib
            log.warning('the pictures could not be written: %s', error)
    tell_end(state, run, is_saved, bool(best) and isinstance(val_data, SegmentationDataset) and not model.is_own)
    columns = dict.fromkeys(key for row in state.history for key in row)       # an event has all of them too, as None
    history = [columns | row if row['event'] else row for row in state.history]
    return Result(history, best, model, run.folder, run.asked, is_saved)


# ===== pictures =======================================================================

# Okabe and Ito 2008, then IBM's: colour-blind readers can tell them apart
PALETTE = np.frombuffer(bytes.fromhex('e69f00 56b4e9 009e73 f0e442 0072b2 d55e00 '
                                      'cc79a7 999999 785ef0 648f11 fe6100 dc267f'), np.uint8).reshape(-1, 3)
PALETTE = np.concatenate([PALETTE * shade for shade in (1, 0.65, 0.4)]).astype(np.uint8)     # darker from the 13th on
FOUND, WRONG, INVENTED, IGNORED = (0, 158, 115), (220, 50, 47), (240, 228, 66), (60, 60, 110)


def contrast(image):
    """The first and 99th percentile of what viewable shows of an image (H, W, C) or TiffRows, from some of its rows."""
    return np.percentile(some_rows(image)[..., :3 if image.shape[2] >= 3 else 1], (1, 99))


def viewable(image, limits=None):
    """(H, W, C) of any dtype -> (H, W, 3) uint8 for looking at; limits: what becomes black and what white."""
    image = image[..., [0, 1, 2] if image.shape[2] >= 3 else [0, 0, 0]]
    if image.dtype != np.uint8:
        low, high = contrast(image) if limits is None else limits
        image = np.clip((image - low) / max(high - low, 1e-9) * 255, 0, 255).astype(np.uint8)
    return image


def colour_mask(mask, num_classes):
    """Class ids -> colours: foreground white for two classes, the palette for more."""
    colours = np.zeros((256, 3), np.uint8)
    colours[0] = 0 if num_classes == 2 else 60
    colours[1:num_classes] = 255 if num_classes == 2 else np.resize(PALETTE, (num_classes - 1, 3))
    colours[IGNORE] = IGNORED
    return colours[mask]


def colour_errors(mask, truth, num_classes):
    """Two classes: found, missed and invented foreground. More: wrong pixels. All else is dark."""
    picture = np.full((*mask.shape, 3), 20, np.uint8)
    picture[mask != truth] = WRONG
    if num_classes == 2:
        picture[(mask == 1) & (truth == 1)] = FOUND
        picture[(mask == 1) & (truth == 0)] = INVENTED
    picture[truth == IGNORE] = IGNORED
    return picture


def colour_key(config, has_errors=True):
    """What the colours of a sheet mean: [(colour, word)]."""
    count = config['num_classes']
    if has_errors and count == 2:
        return [(FOUND, 'found'), (WRONG, 'missed'), (INVENTED, 'invented'), (IGNORED, 'ignored')]
    classes = zip(colour_mask(np.arange(count), count), class_names(config, count))
    wrong = [(WRONG, 'wrong')] if has_errors else []
    return [*classes, *wrong, (IGNORED, 'ignored')]


def keep_small_things(picture, side):
    """A picture of few colours (H, W, 3), thickened so that small things stay visible when it shrinks to `side` pixels:
    of the colours that fall into one pixel the rarest wins. A photograph stays as it is."""
    step, found = math.ceil(max(picture.shape[:2]) / side), Image.fromarray(picture).getcolors(MOST_CLASSES)
    if step == 1 or not found:
        return picture
    found.sort(key=lambda item: (-item[0], item[1]))                   # the rarest colour last
    weights, ranks = np.array([65536, 256, 1], np.int32), np.zeros(2**24, np.uint8)    # nearly all of it never touched
    colours = np.array([colour for _, colour in found], np.uint8)
    ranks[colours @ weights] = np.arange(len(colours))
    return colours[cv2.dilate(ranks[picture @ weights], np.ones((step, step)))]


def sheet(rows, titles, path, legend=()):
    """Draw rows of (caption, [pictures]) as one PNG -> the page. They may be a generator, so that one row at a time is
    held as large as it is. More than six stand in two columns, each picture fits into a square. legend: (colour,
    word) pairs for the foot of the page."""
    try:
        import matplotlib                                              # Pillow's own font has ASCII alone
        font = functools.partial(ImageFont.truetype, f'{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf')
        font(12)
    except (OSError, ImportError, AttributeError):                     # a broken matplotlib, or one without its fonts
        font = ImageFont.load_default
    side, margin, heading, grey = 224, 6, 26, (170, 170, 170)
    smooth, exact = Image.Resampling.BICUBIC, Image.Resampling.NEAREST     # masks keep their colours
    fitted = lambda tile, how: tile.resize([max(1, round(n * side / max(tile.size))) for n in tile.size], how)
    rows = [(caption, [fitted(Image.fromarray(keep_small_things(picture, side) if column else picture),
                              exact if column else smooth)
                       for column, picture in enumerate(pictures)]) for caption, pictures in rows]
    across = 2 if len(rows) > 6 else 1
    high = heading + max((tiles[0].height for _, tiles in rows), default=0)
    wide, longest = margin + len(titles) * (side + margin), max((len(word) for _, word in legend), default=0)
    cell = min(across * wide, max(side // 2, 24 + 7 * longest))        # the width of a word of the legend
    below, per_line = heading + math.ceil(len(rows) / across) * high, across * wide // cell
    page = Image.new('RGB', (across * wide, below + math.ceil(len(legend) / per_line) * heading), 'white')
    draw = ImageDraw.Draw(page)
    for number, (caption, tiles) in enumerate(rows):
        top, left = heading + number // across * high, margin + number % across * wide
        draw.text((left, top + tiles[0].height + 4), clean(caption)[-120:], (70, 70, 70), font(11))
        for tile, title in zip(tiles, titles):
            if number < across:
                draw.text((left, 7), title, 'black', font(12))
            page.paste(tile, (left, top))
            draw.rectangle((left, top, left + tile.width - 1, top + tile.height - 1), outline=grey)
            left += side + margin
    for number, (colour, word) in enumerate(legend):
        left, top = margin + number % per_line * cell, below + number // per_line * heading
        draw.rectangle((left, top + 4, left + 14, top + 18), tuple(map(int, colour)), grey)
        draw.text((left + 20, top + 4), clean(word)[:(cell - 24) // 7], 'black', font(11))
    write_file(path, lambda file: page.save(file, 'PNG'))
    return page


def chosen_samples(shows, most=6):
    """Indices from all over a data set, of which half or more show foreground, if so many do. shows: (N,) bool."""
    spread = lambda rows, count: rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
    chosen = spread(np.arange(len(shows)), most)
    if 2 * shows[chosen].sum() < len(chosen):
        chosen = spread(np.flatnonzero(shows), most // 2)
        chosen = np.sort(np.append(chosen, spread(np.flatnonzero(~shows), most - len(chosen))))
    return chosen.tolist()


def draw_samples(model, dataset, path, dtype=None, captions=None, tta=False):
    """A sheet of images beside truth, prediction and errors -> the page. captions: {index: words after the name of the
    file}; None: six images, see chosen_samples."""
    if captions is None:
        captions = dict.fromkeys(chosen_samples(dataset.rarity > 0), '')
    count, root = model.config['num_classes'], dataset.config['data']
    root = os.path.abspath(DEMO_FOLDER) if root == 'demo' else absolute(root)
    root = os.path.dirname(root) if os.path.isfile(root) else root
    rows = ((os.path.abspath(dataset.name(index)).removeprefix(root + os.sep) + captions[index],
             [viewable(image), colour_mask(truth, count), colour_mask(mask, count), colour_errors(mask, truth, count)])
            for (index, truth), image, mask in decide_stream(model, read_all(dataset, captions), dtype, tta))
    return sheet(rows, ['image', 'truth', 'prediction', 'errors'], path, colour_key(model.config))


LEAVE_OUT = 'skip_broken=True leaves out files that cannot be read'


def read_all(dataset, indices, skip_broken=True):
    """Yield ((index, class ids), image) of the samples at these indices. One that cannot be read is logged and left
    out, or without skip_broken raises DataError."""
    for index, future in read_ahead(dataset.read, indices, depth=2):
        try:
            image, truth = future.result()
            yield (index, truth), image
        except DataError as error:
            if not skip_broken:
                raise DataError([*error.problems, LEAVE_OUT]) from None
            log.warning('left out: %s', error.problems[0])


@contextlib.contextmanager
def without_latex():
    """Draw without it where a notebook, or a matplotlibrc, has set text.usetex: it may not be installed."""
    import matplotlib
    with matplotlib.rc_context({'text.usetex': False}):
        yield


@without_latex()
def draw_curves(history, path):
    """curves.png: loss and IoU over the epochs."""
    from matplotlib.figure import Figure                               # imported late: only pictures need it
    rows = [row for row in history if not row['event']]
    if not rows:
        return
    epochs = [row['epoch'] for row in rows]
    titles = ['Loss', 'IoU'] if 'val_iou' in rows[0] else ['Loss']
    figure = Figure(figsize=(5.2 * len(titles), 3.8), layout='constrained')
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles):
        for side, colour in (('train', '#999999'), ('val', '#0072b2')):
            if (key := f'{side}_{title.lower()}') in rows[0]:
                axes.plot(epochs, [row.get(key) for row in rows], '.-', color=colour, label=side)
        axes.set(title=title, xlabel='epoch')
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)     # no half epochs
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[['top', 'right']].set_visible(False)
    write_file(path, lambda file: figure.savefig(file, format='png', dpi=130))


# ===== using a model ==================================================================


def file_of(run, name='best.pt'):
    """A run folder -> its file of this name; a file -> itself."""
    path = Path(os.path.expanduser(run))
    return path / name if path.is_dir() else path


def is_settled(saved):
    """Whether a checkpoint is of a SegmentationModel on images of the config, which load can make again."""
    return {'mean', 'std'} <= saved['weights'].keys() and saved['config'].get('data') != OWN_DATA


@usual_settings()
def load(path, device='auto', model=None, settings=()):
    """A trained model from a run folder or a best.pt: model.predict(image) gives a mask. A network of your own is
    given again, as it was to train; one that saw data sets of its own is not loaded here. `settings`: keys of CONFIG,
    in place of the run's. Raises UserError."""
    path, trouble = file_of(path), 'cannot load the model'
    check_own(model, None, None, None)
    try:
        saved = load_checkpoint(path)
        if not is_settled(saved):
            raise UserError(f"{path}: holds a network of your own; build it and give it what is in the file: "
                            "model.load_state_dict(torch.load(PATH, weights_only=True)['weights'])", trouble)
        config = {key: saved['config'].get(key, value) for key, value in CONFIG.items()} | {'encoder_weights': None}
        device = choose_device(SYNONYMS.get(('device', str(device).lower()), str(device)))     # all that train() takes
        set_up_device(device)
        units = detect_hardware(device).units
        if config['use_amp'] is True and config['amp_dtype'] not in units:
            if 'use_amp' not in settings:                              # else it is typed, or nothing is computed
                log.info('%s was trained in %s, for which this machine has no units: scores may differ a little', path,
                         config['amp_dtype'])
            config |= {'use_amp': 'bfloat16' in units, 'amp_dtype': 'auto'}    # float16 may overflow here
        if problems := validate_config(config):
            raise UserError([f'{path}: {problem}' for problem in problems], trouble)
        settings = dict(settings)
        problems = [f'unknown key {key!r}: the keys are those of CONFIG' for key in settings if key not in CONFIG]
        if problems := problems or validate_config(settings):
            raise ConfigError(problems)
        if math.prod(config['image_size']) > CONFIG['max_image_pixels']:
            raise ValueError(f'image_size {config["image_size"]}')
        if settings.get('use_amp') is False:
            config['amp_dtype'] = 'auto'
        config |= settings
        loaded = build_model(config, model).float()                    # first, or bfloat16 would round the weights
        loaded.load_state_dict(saved['weights'])
        loaded.threshold = float(saved['threshold'])
        loaded.pixels, loaded.coding, loaded.side = map(saved.get, ('pixels', 'coding', 'side'))
        loaded.stride = 1 if saved.get('stride') == 1 else loaded.stride           # see try_size
        if not 0 < loaded.threshold < 1:
            raise ValueError(f'threshold {loaded.threshold}')
        loaded = laid_out(loaded, config, device)                      # in another layout 16 bits round differently
    except OSError as error:
        advice = 'train(model=smp.from_pretrained(FOLDER)) starts from a folder of smp' if \
            path.with_name('model.safetensors').exists() else 'a run folder holds a best.pt once an epoch is done'
        last = path.with_name('last.pt')
        if path.exists():                                              # damaged
            advice = f'{last} holds the last weights' if path.name == 'best.pt' and last.exists() else ''
        raise UserError(f'{error}; {advice}'.removesuffix('; '), trouble) from None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        own = f'; one of your own is loaded from Python: train_unet.load({str(path)!r}, model=NETWORK)'
        own = own if model is None else '; give the network as it was given to train, wrapped or not'
        own = own if isinstance(error, RuntimeError) else ''           # from load_state_dict: another network
        raise UserError(f'{path}: makes no model{own}: {in_words(error)}', trouble) from None
    return loaded.to(device).eval()


def load_with(run, overrides, verb, **flags):
    """Load a trained model for a command with typed settings, and set TF32 -> (model, {CONFIG key: typed value},
    dtype)."""
    config, sources, _ = resolve_config(None, overrides, found=wrong_flags(flags) + idle_settings(verb, overrides),
                                        words=OWN_WORDS[verb])
    typed = {key for key, origin in sources.items() if origin == 'you'}
    fixed = typed & set('architecture encoder decoder_channels in_channels num_classes image_dtype mean std'.split())
    if fixed:
        raise ConfigError([f'{key}: belongs to the trained network and cannot be changed' for key in sorted(fixed)])
    settings = {key: config[key] for key in typed if config[key] != 'auto'}    # 'auto' keeps the run's own
    model = load(run, config['device'], settings=settings)
    if 'image_size' in settings:
        model.config['progressive_resizing'] = 0.0                     # of training
        with torch.no_grad():                                          # as much memory as a prediction
            try_size(model)                                            # some networks take one size only
    class_names(model.config, model.config['num_classes'])             # refuses a wrong number of names
    precision = resolve_precision(model.config, detect_hardware(next(model.parameters()).device))
    apply_tf32(precision.tf32)
    warn(*precision.warnings)
    return model, settings, precision.dtype


@pillow_as_it_was()
def as_image(image, config):
    """A path, PIL image, array (H, W[, C]) or tensor (C, H, W) -> (H, W, C) array as the network wants it."""
    name = 'the image'
    if isinstance(image, (str, os.PathLike)):
        name = os.path.expanduser(image)
        image = read_array(name, config)
    elif isinstance(image, Image.Image):
        try:                                                           # Image.open has read no pixels yet
            image = pillow_pixels(ImageOps.exif_transpose(image), config['in_channels'], image.format)
        except UNREADABLE as error:
            raise DataError(f'{name}: cannot be read: {in_words(error)}') from None
    elif torch.is_tensor(image):
        image = to_float32(image.detach().cpu()).numpy()
        is_unit = image.dtype == np.float32 and image.size and 0 <= image.min() and image.max() <= 1
        if is_unit and config['image_dtype'] == 'uint8':               # 8 bits after torchvision's ToTensor
            image = (255 * image).round().astype(np.uint8)
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    image = np.asarray(image)
    if image.ndim not in (2, 3) or image.dtype.kind not in 'biuf' or not image.size:
        raise DataError(f'an image of shape {image.shape} and type {image.dtype}: expected numbers, in an array height '
                        f'x width x channels, in a tensor {config["in_channels"]} x height x width')
    image = convert_pixels(image, name, config)
    refuse_other_scale(image, name, config)
    return image


def as_tensor(image):
    """(H, W, C) array -> (1, C, H, W) tensor as the network takes it."""
    return torch.from_numpy(np.require(image, None, ['C', 'W'])).permute(2, 0, 1)[None]    # W: torch warns of others


@torch.no_grad()
def predict_stream(model, images, dtype=None, tta=False):
    """A stream of (key, image (H, W, C)) -> (key, image, bands) for each, in order, prepared exactly as in validation.

    `bands` yields the logits as (K, rows, W) at the image's size, top to bottom. Resized images go through the
    network batch_size at a time; in the other size policies the tiles of one image do.
    `tta` averages over the image and its mirror images (test-time augmentation), with mirror=False that upside down.
    """
    if problems := wrong_flags({'tta': tta}):
        raise ConfigError(problems)
    config, device = model.config, next(model.parameters()).device
    forward = UnderAutocast(model, dtype or resolve_precision(config, detect_hardware(device)).dtype)
    ways = ([], [2]) if config.get('mirror') is False else ([], [3], [2], [2, 3])          # upside down left stays left
    mirrored = lambda x: sum(forward(x.flip(axes)).flip(axes) for axes in ways) / len(ways)
    network = mirrored if tta else forward
    small = lambda image: image.small if isinstance(image, TiffRows) else resize(image, *config['image_size'])
    if config['size_policy'] != 'resize':
        tiled, reach = torch.no_grad(tiled_bands), None                # bands are made in the caller's grad mode
        blank = torch.zeros(1, config['in_channels'], 1, 1, dtype=getattr(torch, config['image_dtype']), device=device)
        for key, image in images:
            rows = lambda first, last, image=image: as_tensor(image[first:last]).to(device)
            reach = find_reach(network, blank, config['image_size'], config) if reach is None else reach
            yield key, image, tiled(network, rows, image.shape[:2], config['image_size'], config['batch_size'], reach)
        return
    images = iter(images)
    while group := list(itertools.islice(images, min(config['batch_size'], 16))):      # at their original size
        batch = torch.cat([as_tensor(small(image)).to(device) for _, image in group])
        for (key, image), logits in zip(group, itertools.chain(*in_halves(network, batch))):
            yield key, image, enlarged_bands(logits, image.shape[:2])


def decide_stream(model, images, dtype=None, tta=False):
    """predict_stream, each image with its mask (H, W) at the model's threshold: (key, image, mask)."""
    for key, image, bands in predict_stream(model, images, dtype, tta):
        yield key, image, torch.cat([classify(band, model.threshold) for band in bands]).cpu().numpy()


@usual_settings()
def predict(run, inputs, output=None, save='mask', tta=False, threshold=None, skip_existing=False, **overrides):
    """Write a mask (PNG of class ids, 0 and 255 for two classes) for each file, folder or glob -> exit code.

    save: 'mask', 'palette' (class ids with colours), 'overlay' or 'probability' (0 to 255; with more than two
    classes a TIFF with a band for each). threshold: of the foreground's probability; None: as stored in the run.
    skip_existing: leave out images that have a mask there. A file that cannot be read costs no other. A TIFF of more
    than 34 million pixels is read by rows where it can be; its mask is a TIFF, written by rows.
    """
    model, _, dtype = load_with(run, overrides, 'predict', tta=tta, skip_existing=skip_existing)
    if save not in ('mask', 'palette', 'overlay', 'probability'):
        raise UserError(f'save={save!r}: choose from mask, palette, overlay, probability', 'nothing to predict')
    if threshold is not None:
        is_for_it = model.config['num_classes'] == 2 and save != 'probability'
        if not (is_for_it and isinstance(threshold, (float, np.floating)) and 0 < threshold < 1):
            problem = 'must be above 0 and below 1' if is_for_it else 'is for masks of two classes alone; leave it out'
            raise UserError(f'threshold={shown(threshold)}: {problem}', 'nothing to predict')
        model.threshold = float(threshold)
    output = Path(os.path.expanduser(output or file_of(run).parent / 'predictions'))
    files = list_inputs(inputs, output)
    refuse_overwriting(files, output, skip_existing)
    there = {mask for _, mask in files if skip_existing and (mask.exists() or mask.with_suffix('.tif').exists())}
    files = [(path, mask) for path, mask in files if mask not in there]
    broken, older, begun = [], 0, time.monotonic()

    def images():
        is_told = False
        opened = read_ahead(lambda file: open_image(file[0], model.config), files)
        for (path, target), future in progress(opened, len(files), 'Predicting'):
            try:
                image = future.result()
                is_told = is_told or warn_of_other_depth(path, lambda: [read_header(path, model.config)[2]], model)
                warn_of_larger(path, image, model)
                if isinstance(image, TiffRows) and model.config['size_policy'] == 'resize':
                    image.small = shrink_by_rows(image, *model.config['image_size'])   # a broken file fails here
                yield target, image
            except DataError as error:
                broken.append(error.problems[0])

    for target, image, bands in predict_stream(model, images(), dtype, tta=tta):
        output.mkdir(parents=True, exist_ok=True)                      # if it fails, at the first mask
        is_older = target.exists()
        try:
            write_prediction(target, image, bands, model, save)
            older += is_older
        except DataError as error:                                     # a large file may be broken further down
            broken.append(error.problems[0])
        except (RuntimeError, OSError) as error:
            if is_out_of_memory(error):
                raise
            broken.append(f'{target}: cannot be written: {in_words(error)}')
    written, seconds = len(files) - len(broken), max(1e-9, time.monotonic() - begun)
    others = f', {len(there)} there already' * bool(there) + f', {older} in place of older ones' * bool(older)
    print(f'{counted(written, "mask")} in {clean(output)} ({written / seconds:.1f} images/s in {dtype}){others}')
    if written and save == 'mask' and (classes := model.config['num_classes']) > 2:
        print(f'They hold class numbers, 0 to {classes - 1}, which look black; save=palette adds colours')
    if written:
        print('Next: ', command_line('export', quoted(run), 'format=onnx'))
    if broken:
        print(UserError(broken, f'{counted(len(broken), "file")} could not be predicted'), file=sys.stderr)
    return 1 if broken else 0


def warn_of_other_depth(name, modes, model):
    """Warn of images stored otherwise than those trained on -> whether there are any. modes() is called if needed."""
    others = {*map(image_dtype_of, modes())} - {*was.split()} if re.search('16|32', was := str(model.pixels)) else ()
    if others:
        log.warning('%s: stored as %s, what was trained on as %s; is the scale the same? uint8 and uint16 become 0 to '
                    '1, all else stays as it is', clean(name), ' and '.join(sorted(others)), model.pixels)
    return bool(others)


def warn_of_larger(name, image, model):
    """Warn once of an image that is shrunk much more than any trained on, as a whole field after tiles of fields."""
    side, config = model.side, model.config
    if isinstance(side, int) and config['size_policy'] == 'resize' \
            and max(image.shape[:2]) > max(2 * side, *config['image_size']):
        how = 'type size_policy=crop' if max(config['image_size']) == side else f'predict tiles of {side} pixels'
        log.warning('%s: its %d pixels are shrunk to image_size, in training at most %d were; if those were cut from '
                    'such images %s', clean(name), max(image.shape[:2]), side, how)
        model.side = None


def list_inputs(inputs, output):
    """Files, folders and globs -> [(path, PNG to write below output)]. Raises UserError.

    Folders inside a folder are kept. No mask overwrites another: where two names would be the same, all files keep
    the folders in which they differ; a.jpg and a.tif keep their suffixes.
    """
    files = {}                                                         # full path: name below output
    is_one = isinstance(inputs, (str, os.PathLike)) or not hasattr(inputs, '__iter__')
    inputs = [inputs] if is_one else list(inputs)
    if not all(isinstance(item, (str, os.PathLike)) for item in inputs):
        raise UserError('images are paths here; an array is for load(RUN).predict(array)', 'nothing to predict')
    if not inputs:
        raise UserError('the list of images is empty', 'nothing to predict')
    for item in map(os.path.expanduser, inputs):
        places = [item] if os.path.exists(item) else sorted(glob.glob(item, recursive=True))
        found = {place: os.path.basename(place) for place in places if os.path.isfile(place)}
        for place in filter(os.path.isdir, places):
            found |= {os.path.join(place, *entry): os.path.join(*entry) for entry in list_files(Path(place))}
        if not os.path.isfile(item):                                   # a file that was typed is tried, whatever it is
            others = [clean(name) for name in found.values()
                      if not may_be_read(base := os.path.basename(name)) and base[0] != '.']       # a Mac's .DS_Store
            if others and len(others) < len(found):
                log.info('no images, left out: %s', '; '.join(shorten(others, 3)))
            found = {path: name for path, name in found.items()
                     if may_be_read(os.path.basename(path)) and not is_written_by_predict(path)}
        if not found:
            why = 'holds no image, or masks of predict alone' if places else f'there is no such file{named_like(item)}'
            raise UserError(f'{item}: {why}', 'nothing to predict')
        for path, name in found.items():
            files.setdefault(os.path.abspath(path), name)
    if len({name.casefold() for name in files.values()}) < len(files):     # on Windows a.png is A.png
        if len({Path(path).drive for path in files}) > 1:              # of Windows
            raise UserError('images of equal names on several drives: predict each drive into a folder of its own (-o)',
                            'nothing to predict')
        common = os.path.commonpath([os.path.dirname(path) for path in files])
        files = {path: os.path.relpath(path, common) for path in files}
    stems = {path: os.path.splitext(name)[0] for path, name in files.items()}
    times = Counter(word.casefold() for path, name in files.items() for word in {name, stems[path]})   # any case
    return [(path, output / f'{stem if times[stem.casefold()] == 1 else files[path]}.png')
            for path, stem in stems.items()]                           # a.jpg, A.tif and a.jpg.png all need a suffix


def refuse_overwriting(files, output, skip_existing=False):
    """UserError if a mask would overwrite an image, be it one of the inputs or another file in the output folder. With
    skip_existing the latter stays, as it is a mask, perhaps one that was corrected by hand."""
    if not output.is_dir() and (output.exists() or output.suffix.lower() in SUFFIXES):
        raise UserError(f'-o {output}: name a folder; masks get the names of their images', 'nothing to predict')
    images = {path for path, _ in files}                               # whole paths, see list_inputs
    lost = [str(path) for _, target in files for path in (target, target.with_suffix('.tif'))
            if path.is_file() and not is_written_by_predict(path)
            and (not skip_existing or os.path.abspath(path) in images)]
    if lost:
        raise UserError([*shorten(lost), 'would be overwritten by masks; type -o with another folder'],
                        'nothing to predict')


MARK = 'train_unet predict'        # the software that a mask names as its maker


def is_written_by_predict(path):
    """Whether a file is a mask of an earlier predict: the head of a PNG or TIFF names the software that wrote it."""
    if os.path.isfile(path):                                           # opening a pipe would block
        with contextlib.suppress(OSError), open(path, 'rb') as file:
            return MARK.encode() in file.read(4096)
    return False


def read_ahead(read, items, depth=4):
    """Yield (item, future of read(item)) in order, reading up to `depth` items ahead in threads."""
    with ThreadPoolExecutor(depth) as pool:
        futures = ((item, pool.submit(read, item)) for item in items)
        waiting = deque(itertools.islice(futures, depth))
        while waiting:
            waiting.extend(itertools.islice(futures, 1))
            yield waiting.popleft()


def write_prediction(target, image, bands, model, save):
    """One picture of predict, written whole or not at all: a PNG; for TiffRows, and the probabilities of more than two
    classes, a TIFF written tile by tile."""
    rows, count = rendered_rows(bands, image, model, save), model.config['num_classes']
    palette, many = colour_mask(np.arange(256), count), save == 'probability' and count > 2
    if isinstance(image, TiffRows) or many:
        shape = *image.shape[:2], *([3] if save == 'overlay' else [count] if many else [])
        kind = {'overlay': 'rgb', 'palette': 'palette'}.get(save, 'minisblack')
        colours = palette.T.astype(np.uint16) * 257 if save == 'palette' else None
        write_file(target.with_suffix('.tif'), lambda file: tifffile.imwrite(
            file, cut_tiles(rows, 256), shape=shape, dtype=np.uint8, tile=(256, 256), compression='zlib',
            photometric=kind, colormap=colours, planarconfig='contig', software=MARK, bigtiff=math.prod(shape) > 4e9))
    else:
        picture = Image.fromarray(np.stack(list(rows)))
        if save == 'palette':
            picture.putpalette(palette.tobytes())
        mark = PngImagePlugin.PngInfo()
        mark.add_text('Software', MARK)
        write_file(target, lambda file: picture.save(file, 'PNG', pnginfo=mark))


def cut_tiles(rows, side):
    """An iterator of rows, top to bottom -> square tiles, row by row; those at the rims may be smaller."""
    while strip := list(itertools.islice(rows, side)):
        strip = np.stack(strip)
        yield from (strip[:, left:left + side] for left in range(0, strip.shape[1], side))


def rendered_rows(bands, image, model, save):
    """Bands of logits -> rows as predict writes them: class ids, an overlay on the image, probabilities (0 to 255)."""
    limits, top = contrast(image) if save == 'overlay' and image.dtype != np.uint8 else None, 0
    for logits in bands:
        if save == 'probability':
            picture = (chances(logits) * 255).round().to(torch.uint8).cpu().numpy()
            picture = picture[0] if len(logits) == 1 else np.moveaxis(picture, 0, -1)
        else:
            picture = classify(logits, model.threshold).cpu().numpy()
        if save == 'overlay':
            colours = colour_mask(picture, max(3, model.config['num_classes']))
            below = viewable(image[top:top + len(picture)], limits)
            picture = np.where((picture > 0)[..., None], below // 2 + colours // 2, below)
        elif save == 'mask' and model.config['num_classes'] == 2:
            picture = picture * 255
        yield from picture
        top += len(picture)


@usual_settings()
def evaluate(folder, split=None, tta=False, **overrides):
    """Score the best weights on the run's validation images, on another split of them, or on other data -> what
    metrics.json holds.

    Writes metrics.json, worst.png (the twelve images where truth and prediction differ most: often the labels
    are wrong there), confusion.png, curves.png. For two classes the threshold with the best validation IoU is found and
    stored; on all else the stored one is used, because tuning it there would flatter the score. tta: as in predict.
    """
    if split not in (None, *SPLITS):
        raise ConfigError(f'split={split!r}: choose from {", ".join(SPLITS)}')
    model, overrides, dtype = load_with(folder, overrides, 'evaluate', tta=tta)
    other, typed = 'data' in overrides, split
    drawn = [key for key in ('seed', 'val_fraction', 'fold', 'group_pattern') if key in overrides and not other]
    if drawn:
        raise ConfigError(f'{", ".join(drawn)}: would draw other validation images, some of which were trained on')
    if empty := [key for key in ('seed', 'group_pattern') if key in overrides and not overrides.get('val_fraction')]:
        raise ConfigError(f'{", ".join(empty)}: no effect: data= is scored whole, unless val_fraction is typed')
    dataset, split, are_known = images_to_score(folder, model, overrides, typed)
    place = [Path(model.config['data']).resolve().name or 'drive'] if other else []    # the top of one has no name
    of_what = '_'.join(place + [typed] * bool(typed and (other or typed != 'val')))    # '': what training validated on
    num_classes = model.config['num_classes']
    levels = sorted({0.5, model.threshold, *(i / 20 for i in range(1, 20) if num_classes == 2)})
    rows = progress(range(len(dataset)), len(dataset), 'Evaluating')
    images = read_all(dataset, rows, model.config['skip_broken'])
    scores, total = {}, 0
    for (index, truth), _, bands in predict_stream(model, images, dtype, tta=tta):
        found = count_at_levels(bands, truth, levels, num_classes)
        scores[index], total = found.to_sparse(), total + found        # an image shows few of many classes
    if not scores:
        raise DataError(f'{model.config["data"]}: none of {len(dataset)} images can be read')
    counts = dict(zip(levels, total))
    changed = {key: overrides[key] for key in overrides.keys() - FREE_TO_TUNE - {'data'}}
    changed |= {'tta': True} if tta else {}
    is_tuned = num_classes == 2 and are_known and bool(counts[0.5][1].sum()) and not (of_what or changed)
    if is_tuned:
        tried = {level: compute_metrics(counts[level]) for level in levels}
        level = max(levels, key=lambda level: (tried[level]['iou'], -abs(level - 0.5)))
        is_tuned = not is_trivial(tried[level]) and store_threshold(folder, level, model)
    for index, score in scores.items():                                # without the numbers of each class
        found = score.to_dense()[levels.index(model.threshold)]
        scores[index] = {key: value for key, value in compute_metrics(found).items() if isinstance(value, float)}
        scores[index]['counts'] = found[:2, :2].clone()                # a view would keep all of it
    return report(folder, model, dataset, split, counts, scores, of_what, is_tuned, changed, overrides)


def images_to_score(folder, model, overrides, wanted=None):
    """The run's validation images or the `wanted` split, or those of other data -> (dataset, split, whether they are
    the ones to be scored). Changes model.config to suit; warns of images that were trained on. DataError if there are
    none."""
    other, as_trained = 'data' in overrides, dict(model.config)
    with contextlib.suppress(UserError, LookupError, TypeError):       # a resume may have been told where they are
        now = {} if other else load_last(file_of(folder).parent)[0]['config']
        model.config |= {key: now[key] for key in (DATA_KEYS | {'skip_broken'}) & now.keys() - overrides.keys()
                         if not find_fault(key, now[key])}
    if other:
        model.config |= {key: overrides.get(key, 0) for key in ('val_fraction', 'fold')}   # 0: all images are scored
        model.config |= {} if model.config['val_fraction'] else {'group_pattern': None}    # others have other names
    elif model.config['data'] != 'demo' and not os.path.exists(model.config['data']):
        split = ' '.join(as_typed(key, model.config[key]) for key in ('val_fraction', 'fold'))
        raise DataError(f'{model.config["data"]}: is not there; if it has moved type data=NEW_PLACE {split}')
    with as_learnt(model.config, model.coding, other):
        data = inspect_other(model) if other else inspect_data(model.config)
    names = [wanted] if wanted else ['val', 'test', 'train'] if other else ['val', 'train']
    split = next((name for name in names if SPLITS.index(name) in data.pairs.splits), names[-1])
    if wanted and SPLITS.index(wanted) not in data.pairs.splits:
        raise DataError(f'split={wanted}: {model.config["data"]} has no {wanted} images with masks')
    dataset = SegmentationDataset(data, split, model.config, is_training=False)
    dataset.is_mixed |= other                                          # other data may be scaled differently
    are_known = other or are_its_images(folder, data, model.config) is not False
    if not are_known:
        log.warning('The images, or their split, are not those this run began with: some that are scored may have '
                    'been trained on. The threshold stays as it is')
    if other:
        warn_of_trained(folder, data, split, as_trained)
    return dataset, split, are_known


def warn_of_trained(folder, data, split, as_trained):
    """Warn where images of other data, one of whose splits is scored, are among those that the run was trained on."""
    with contextlib.suppress(UserError):                               # where a split cannot be drawn, data are gone
        share = as_trained['val_fraction']
        if split == 'train' and share and are_its_images(folder, inspect_data(as_trained), as_trained):
            log.warning('These are the images of this run, and it was trained on most of them: '
                        'type val_fraction=%s fold=%s too, to score only those held out', share, as_trained['fold'])
            return
        begun = CONFIG | load_checkpoint(file_of(folder))['config']
        scored = {*map(os.path.realpath, data.pairs.images[data.pairs.rows(split)])}
        if scored & {*map(os.path.realpath, find_pairs(begun).images)}:            # another fold of a cross-validation?
            pairs = inspect_data(begun).pairs                          # the split that kept copies on one side
            trained = scored & {*map(os.path.realpath, pairs.images[pairs.rows('train')])}
            if trained:
                log.warning('%d of these %d images were trained on: the score flatters', len(trained), len(scored))


def inspect_other(model):
    """Inspect data that a model was not trained on -> Data; prints it, and how it differs from the training's.
    DataError if it cannot be used (without advice for a training) or if no score would mean anything."""
    data = inspect_data(model.config)
    of_training = '^(no validation|no training mask|val_fraction=0:|trained on too|all pixels of the validation)|' \
                  'oversample_foreground=|group_pattern|num_classes=|in_channels=|in no split by name|' \
                  'on several sides|validate too'
    data.notes = [note for note in data.notes if not re.search(of_training, note)]
    print('\n'.join(map(clean, describe_data(data, model.config))))
    warn_of_other_depth(model.config['data'], lambda: data.modes, model)
    plain = lambda words: re.sub(r'[\d.]+% | to \d+|;.*', '', words or '')     # what occurs, shares: differ everywhere
    if plain(model.coding) not in ('', plain(data.coding.words)):
        log.warning('the masks are not coded as in training: %s; there: %s', data.coding.words, clean(model.coding))
    if len(data.classes) < 2 <= len(data.values) or IGNORE in data.classes and len(data.classes) < 3:
        raise DataError([f'{model.config["data"]}: all pixels are of one class or ignored: no score means anything',
                         'say in mask_values which value is which class'])
    return data


FREE_TO_TUNE = set('device num_workers cache_images batch_size use_amp amp_dtype tf32_matmul_precision skip_broken '
                   'class_names max_image_pixels'.split())     # what leaves a tuned threshold the run's own


def are_its_images(folder, data, config):
    """Whether these are the images and the split that a run began with; None, without last.pt: unknown."""
    sets = [SegmentationDataset(data, split, config, is_training=False) for split in ('train', 'val')]
    with contextlib.suppress(UserError, LookupError, TypeError):
        began = load_last(file_of(folder).parent)[0]['images']
        return began[:64] == hash_images(*sets) and began[128:] in ('', data.marks)    # older runs: no marks


def count_at_levels(bands, truth, levels, num_classes):
    """(levels, K, K) confusion of one image at each threshold: bands of logits (K, h, W) against the truth (H, W)."""
    counts, truth = 0, torch.from_numpy(truth)
    for band in bands:
        target, truth = truth[:band.shape[1]].to(band.device), truth[band.shape[1]:]
        if num_classes == 2:                                           # how many levels each pixel is above, at once
            found = confusion_matrix(sum(classify(band, level) for level in levels), target, len(levels) + 1)[:2]
            below = found.cumsum(1).T[:-1]                             # (levels, 2)
            counts += torch.stack([below, found.sum(1) - below], -1)
        else:
            counts += confusion_matrix(classify(band), target, num_classes).expand(len(levels), -1, -1)
    return counts.cpu()                                                # once: this waits for the device


def store_threshold(folder, level, model):
    """Put a tuned threshold into the model and into best.pt, where load and predict find it -> whether that was done.
    It is not while a training works there, if best.pt has got other weights since the model was loaded, or where it
    cannot be written."""
    path, weights, why = file_of(folder), model.state_dict(), 'best.pt has other weights by now'
    lock = path.parent / '.lock'
    try:
        if lock.is_symlink():                                          # older filelocks empty what it leads to
            raise OSError('.lock is a link')
        with filelock.FileLock(str(lock), timeout=0):
            saved = load_checkpoint(path)
            if all(name in weights and torch.equal(value, weights[name].cpu())
                   for name, value in saved['weights'].items()):
                save_checkpoint(path, saved | {'threshold': level})
                model.threshold = level
                return True
    except filelock.Timeout:
        why = 'a training or another evaluate is at work there'
    except (OSError, NotImplementedError) as error:                    # a full disk, a run that may only be read
        why = in_words(error)
    log.warning('%s: %s, so the best threshold (%.2f) is not stored', path.parent, why, level)
    return False


EMPTY_RULE = 'a class neither in truth nor in prediction is left out, an image without any too; in one alone it is 0'


def report(typed_run, model, dataset, split, counts, per_image, of_what, is_tuned, changed, typed):
    """Write and print what evaluate found -> the content of metrics.json. `counts` at each threshold, `per_image`
    {index: metrics} at the model's; `of_what`: names a folder for it, '' is that of the run; `changed`: the settings
    that are not the run's own, `typed`: all that were. OSError, after printing, where it cannot be written."""
    run, level = file_of(typed_run).parent, model.threshold
    folder = evaluation_folder(run, of_what, model.config['data']) if of_what else run
    metrics, tuned = compute_metrics(counts[level if of_what else 0.5]), compute_metrics(counts[level])
    names = class_names(model.config, model.config['num_classes'])
    images = [{'file': dataset.name(index), 'index': index, 'iou': score['iou'], 'dice': score['dice'],
               'wrong_pixels': 1 - score['accuracy']} for index, score in per_image.items()]
    content = {'data': absolute(model.config['data']), 'split': split, 'settings': changed,
               'metrics': metrics, 'threshold': level, 'metrics_at_threshold': tuned,
               'confusion_at_threshold': counts[level].tolist(), 'classes': names, 'empty_masks': EMPTY_RULE,
               'images': images}
    content = json.loads(json.dumps(content), parse_constant=lambda _: None)   # JSON knows no NaN: null
    right = lambda row: 1 - np.nan_to_num(row['wrong_pixels'])         # NaN: all of it is ignored
    agreement = lambda row: right(row) + (right(row) if math.isnan(row['iou']) else row['iou'])
    worst = {row['index']: f'   IoU {row["iou"]:.3f}, {row["wrong_pixels"]:.1%} wrong'
             for row in sorted(images, key=agreement)[:12]}
    trouble, made = None, ['metrics.json', 'worst.png', 'confusion.png', 'curves.png']
    try:
        write_file(folder / 'metrics.json', json.dumps(content, indent=1).encode())
        draw_samples(model, dataset, folder / 'worst.png', captions=worst, tta='tta' in changed)
        draw_confusion(counts[level], names, folder / 'confusion.png')
        with contextlib.suppress(UserError, LookupError, TypeError):   # without last.pt the old curves stay
            draw_curves(load_last(run)[0]['history'], folder / 'curves.png')
    except OSError as error:                                           # a full disk, or a run that others may only read
        trouble = error
    except (ImportError, RuntimeError, ValueError) as error:           # a broken matplotlib
        log.warning('the pictures could not be written: %s', error)
        made = made[:1]                                                # others are of earlier evaluations
    there = [name for name in made if (folder / name).exists()]
    is_all = of_what and split == 'train' and not of_what.endswith('train')    # of other data that name no split
    what = 'images' if is_all else f'{split} images'
    what += f' of {clean(model.config["data"])}' if of_what else ''
    two = len(names) == 2                                              # printed after writing: a pipe may be closed
    at_half = ', at threshold 0.50' if two and not of_what else ''
    print(f'{len(per_image)} {what}: IoU {metrics["iou"]:.4f}, Dice {metrics["dice"]:.4f}, '
          f'mean IoU of all classes {metrics["mean_iou"]:.4f}{at_half}')
    if changed:
        print('with', *(as_typed(*item) for item in sorted(changed.items())))
    print_classes(metrics, names)
    if two:
        how = 'best on these images, tuned on them; stored, and used by predict' if is_tuned else 'that of the run'
        print(f'threshold {level:.2f}: IoU {tuned["iou"]:.4f} ({how})')
    print_images(images, f' at threshold {level:.2f}' if two else '')
    if two:
        print_detection([score['counts'].tolist() for score in per_image.values()])
    print(f'Empty masks: {EMPTY_RULE}')
    tell_detail(dataset)
    warn_if_trivial(tuned, model.config, typed_run if 'data' in typed and not typed.get('val_fraction') else None)
    if trouble:
        raise trouble
    print(f'Written to {clean(folder)}: {", ".join(there)}')
    has_test = not of_what and SPLITS.index('test') in dataset.pairs.splits
    verb, what = ('evaluate', 'split=test') if has_test else ('predict', 'YOUR_IMAGES')
    again = {key: value for key, value in (typed | changed).items()
             if has_test or key in ('tta', 'image_size', 'size_policy')}
    print('Next: ', command_line(verb, quoted(typed_run), what, *itertools.starmap(as_typed, again.items())))
    return content


def print_images(images, at_level):
    """How IoU and Dice spread over the images that have any. images: the rows of metrics.json."""
    if values := [(row['iou'], row['dice']) for row in images if not math.isnan(row['iou'])]:
        iou, dice = zip(*values)
        shares = ', '.join(f'{q} % {np.percentile(iou, q):.3f}' for q in (5, 25, 50, 75, 95))
        print(f'IoU per image{at_level}: {shares}; {len(images) - len(iou)} of {len(images)} images are not counted')
        print(f'Dice per image{at_level}: mean {np.mean(dice):.4f}, standard deviation {np.std(dice):.4f}')


def print_detection(counts):
    """By image, of two classes: how often foreground was found, and how often invented. counts: confusion matrices."""
    hits = [found > 0 for _, (missed, found) in counts if missed + found]
    alarms = [invented > 0 for (empty, invented), (missed, found) in counts if empty + invented and not missed + found]
    print(f'foreground is met in {sum(hits)} of {counted(len(hits), "image")} that have it, invented in {sum(alarms)} '
          f'of {len(alarms)} without')


def print_classes(metrics, names):
    """The table of classes, and their mean."""
    wide = max(20, *(len(name) + 1 for name in names))
    print(f'{"class":<{wide}}{"IoU":>8}{"Dice":>8}{"precision":>11}{"recall":>8}')
    columns = [[*metrics[f'{key}_per_class'], metrics[f'mean_{key}']] for key in ('iou', 'dice', 'precision', 'recall')]
    for name, iou, dice, precision, recall in zip([*names, 'mean'], *columns):
        print(f'{name:<{wide}}{iou:>8.3f}{dice:>8.3f}{precision:>11.3f}{recall:>8.3f}')


def evaluation_folder(run, of_what, data):
    """The folder for the scores of other images, with a number if other data of that name has one."""
    name, data = f'evaluation_{of_what}', absolute(data)
    for number in itertools.count(1):
        folder = run / (f'{name}-{number}' if number > 1 else name)
        told = folder / 'metrics.json'                                 # perhaps a pipe
        with contextlib.suppress(*UNREADABLE):
            if folder.is_symlink() or told.is_file() and json.loads(told.read_text())['data'] != data:
                continue                                               # a link may lead out of a run of unknown origin
        return folder


@without_latex()
def draw_confusion(counts, names, path):
    """confusion.png: share of each true class (row) that was predicted as each class (column)."""
    from matplotlib.figure import Figure
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    size = max(3.6, 0.55 * len(names) + 1.8)
    figure = Figure(figsize=(size + 0.6, size), layout='constrained')
    axes = figure.subplots()
    axes.imshow(shares, cmap='Blues', vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005 and len(names) <= 60:                        # more take a minute, and nobody can read them
            axes.text(column, row, f'{share:.2f}', ha='center', va='center', fontsize=8,
                      color='white' if share > 0.5 else 'black')
    axes.set(xlabel='predicted', ylabel='truth', title='Share of each true class')
    axes.set_xticks(range(len(names)), names, rotation=45, ha='right', parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    write_file(path, lambda file: figure.savefig(file, format='png', dpi=min(130, 4000 / size)))


# ===== export =========================================================================


@usual_settings()
def export(run, format='onnx', output=None, half=False):
    """Write the best model for other programs -> exit code. The file takes its place only if it agrees with the model.

    onnx, pt2: images (B, C, H, W) as stored -> logits (B, K, H, W), for any batch and, where the network allows it, any
    size (pt2: sides above 32); preprocessing is inside. smp: a folder for smp.from_pretrained, with mean and std as
    its preprocessing parameters. half stores the weights as float16 (onnx, smp).
    """
    writers = {'onnx': (export_onnx, '.onnx'), 'pt2': (export_pt2, '.pt2'), 'smp': (export_smp, '_smp')}
    if format not in [*writers]:                                       # a list has no hash
        raise UserError(f'format={format!r}: choose from {", ".join(writers)}', 'cannot export')
    if problems := wrong_flags({'half': half}):
        raise ConfigError(problems)
    if half and format == 'pt2':
        raise UserError('half=True: onnx and smp store weights as float16; pt2 does not', 'cannot export')
    model = load(run, 'cpu', None, OFF)
    write, suffix = writers[format]
    path = Path(os.path.expanduser(output or file_of(run).parent / f'model{suffix}'))
    is_older = format == 'smp' and (path / 'preprocessing.json').exists()
    path = path / f'model{suffix}' if path.is_dir() and not is_older else path     # -o . spares a README.md there
    if format != 'smp' and path.suffix != suffix:                      # -o runs/x/best.pt would replace the model
        raise UserError(f'-o {path}: {format} wants a name that ends in {suffix}', 'cannot export')
    real = example_images(model.config)
    if format != 'smp' and model.pixels == 'uint16':
        model.config['image_dtype'] = 'uint16'                         # the division goes into the file
        real = [(65535 * images).round().to(torch.uint16) for images in real]
    path.parent.mkdir(parents=True, exist_ok=True)
    folder, name = (path, '') if format == 'smp' else (path.parent, path.name)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh, faults = Path(scratch, name), []
        for is_free in (True, False) if format != 'smp' else (True,):  # some can be written for one size only
            try:
                with unittest.mock.patch('timm.layers.padding.get_same_padding', same_padding):
                    again, drawn = write(copy.deepcopy(model), fresh, half, is_free), drawn_images(model, is_free)
                found = [compare_exported(model, again, images, 3e-3 if half else 1e-5)        # apart, as the logits of
                         for images in (real, drawn) if images]                                # noise may be larger
                worst, agree = max(found)[0], min(agree for _, agree in found)
                break
            except OSError as error:                                   # not the name of what is thrown away
                raise OSError(error.errno or errno.EIO, error.strerror or in_words(error), str(path)) from None
            except ImportError as error:                               # or too old for this torch
                advice = ': pip install -U onnx onnxscript onnxruntime' * (format == 'onnx')
                raise UserError(f'{error}{advice}', 'cannot export') from None
            except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, LookupError) as error:
                sizes = 'all sizes' if is_free else 'one size'
                faults.append(f'{path} cannot be written for {sizes}: {in_words(error)}')
        else:
            advice = ['torch 2.6 cannot write this as ONNX, torch 2.9 can']
            raise UserError(faults + advice * (format == 'onnx' and torch.__version__ < (2, 9)), 'cannot export')
        folder.mkdir(exist_ok=True)
        for file in Path(scratch).iterdir():                           # only now are older files replaced
            os.replace(file, folder / file.name)
    print(f'{clean(path)}: on {len(real)} validation images and {len(drawn)} drawn ones the largest difference of a '
          f'logit is {worst:.2e}, and {agree:.4%} of the labels are equal')
    if not is_free:
        height, width = model.config['image_size']
        print(f'it takes images of {width} x {height} only: {model.config["architecture"]} cannot be written as '
              f'{format} for these and others')
    elif format == 'pt2':
        print('it takes images with sides above 32 pixels; onnx takes smaller ones too')
    return 0


def example_images(config):
    """Up to 20 validation images at network size, as tensors. [] if the data is no longer there."""
    try:
        dataset = SegmentationDataset(inspect_data(config), 'val', config, is_training=False)
    except UserError as error:
        print(f'checked on drawn images only: {clean(error.problems[0])}')
        return []
    images = read_all(dataset, range(min(20, len(dataset))))
    return [as_tensor(resize(image, *config['image_size'])) for _, image in images]


def drawn_images(model, is_free):
    """Noise as tensors: a batch of 3 at image_size and, if sizes are free, one image each of odd, small and large size;
    without those that the network does not take."""
    config, draw = model.config, torch.Generator().manual_seed(0)
    kind, scale = config['image_dtype'], {'uint8': 1, 'uint16': 257, 'float32': 1 / 255}
    shapes = [(3, *config['image_size']), *[(1, 97, 131), (1, 64, 64), (1, 320, 256)] * is_free]
    noise = (torch.randint(0, 256, (count, config['in_channels'], *size), generator=draw) for count, *size in shapes)
    drawn = [(scale[kind] * images).to(getattr(torch, kind)) for images in noise]
    return [images for images in drawn if takes(model, images)]


@torch.no_grad()
def takes(model, images):
    """Whether a network takes images of this size."""
    try:
        return model(images) is not None
    except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        return False


@torch.no_grad()
def compare_exported(model, again, examples, tolerance):
    """A model against its exported self, on images -> (largest difference of a logit, share of equal labels).

    ValueError if the difference is above `tolerance` x the largest logit (or x 10, if that is more): sums in another
    order differ by less.
    """
    differences, sizes, same = [], [torch.tensor(10.0)], []
    for images in examples:
        wanted, got = model(images), torch.as_tensor(again(images))
        differences.append((wanted - got).abs().max())
        sizes.append(wanted.abs().max())
        same.append((classify(wanted, model.threshold) == classify(got, model.threshold)).flatten())
    worst = float(torch.stack(differences).max())                      # NaN if any is, hence 'not <='
    if not worst <= tolerance * float(max(sizes)):
        raise ValueError(f'it does not agree with the model it was made from: logits differ by {worst:.2e}')
    return worst, float(torch.cat(same).double().mean())


def trace_example(model, is_free):
    """An example input and the dimensions of it that stay free: the first, and height and width if they can."""
    config = model.config
    size = (250, 310) if is_free else config['image_size']             # PAN takes no smaller ones
    images = torch.zeros((2, config['in_channels'], *size), dtype=getattr(torch, config['image_dtype']))
    model.exporting = True                                             # torch.compiler.is_exporting is not reliable
    fold_upsampling(model, False)
    return images, {'images': {axis: torch.export.Dim.AUTO for axis in ((0, 2, 3) if is_free else (0,))}}


def same_padding(side, kernel, stride, dilation):
    """timm's padding of TensorFlow's networks in integers: with its ceil of a float no export of free sizes ends."""
    return max((-(-side // stride) - 1) * stride + (kernel - 1) * dilation + 1 - side, 0)


def pool_by_product(x, size):
    """F.adaptive_avg_pool2d, (B, C, H, W) -> (B, C, *size), as two matrix products: torch's export of it to ONNX runs
    at the example's size only."""
    def shares(length, bins):                                          # (bins, length): the mean over each bin
        number, at = torch.arange(bins, device=x.device)[:, None], torch.arange(length, device=x.device)
        inside = ((at >= number * length // bins) & (at < -(-(number + 1) * length // bins))).to(x.dtype)
        return inside / inside.sum(1, keepdim=True)

    high, wide = size if isinstance(size, (tuple, list)) else (size, size)
    return shares(x.shape[2], high or x.shape[2]) @ x @ shares(x.shape[3], wide or x.shape[3]).T


def export_onnx(model, path, half, is_free):
    """ONNX with threshold, classes and config as metadata -> a function that runs it."""
    onnx, runtime, _ = map(importlib.import_module, ('onnx', 'onnxruntime', 'onnxscript'))
    images, free = trace_example(model, is_free)
    # UPerNet has the module; smp's PSPNet pools inside F.interpolate, where PooledByProduct would not reach it
    pooling = unittest.mock.patch.object(F, 'adaptive_avg_pool2d', pool_by_product)
    with pooling, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        program = torch.onnx.export(model, (images,), dynamic_shapes=free, input_names=['images'],
                                    output_names=['logits'], dynamo=True, verbose=False)
    written = program.model_proto
    for node in [*written.graph.node, *(node for function in written.functions for node in function.node)]:
        del node.metadata_props[:]                                     # stack traces, which reveal local paths
    for key, value in export_facts(model).items():
        written.metadata_props.add(key=key, value=value)
    if half:
        store_half(onnx, written)
    write_file(path, written.SerializeToString())
    faults = tuple(kind for kind in vars(runtime.capi.onnxruntime_pybind11_state).values()
                   if isinstance(kind, type) and issubclass(kind, Exception))
    session = functools.cache(lambda: runtime.InferenceSession(str(path), providers=['CPUExecutionProvider']))

    def run(images):
        try:
            return session().run(None, {'images': images.numpy()})[0]
        except faults as error:                                        # they share no base class
            raise RuntimeError(str(error)) from None
    return run


def store_half(onnx, written):
    """Keep the large weights of an ONNX graph as float16, cast to float32 where they are used."""
    for tensor in written.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) > 64:
            value, name = onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, name + '_half'))
            cast = onnx.helper.make_node('Cast', [name + '_half'], [name], to=onnx.TensorProto.FLOAT)
            written.graph.node.insert(0, cast)                         # before whatever uses it


def export_facts(model):
    """What a program that loads the file needs to know."""
    config = model.config
    return {'threshold': str(model.threshold),
            'classes': json.dumps(class_names(config, config['num_classes'])),
            'image_size': json.dumps(config['image_size']), 'size_policy': config['size_policy'],
            'input': ('RGB, ' if config['in_channels'] == 3 else '') + (
                'float32; 8-bit images divided by 255, 16-bit ones by 65535, others as stored'
                if config['image_dtype'] == 'float32' else f"{config['image_dtype']}, as stored"),
            'note': ('images are shrunk by area (cv2.INTER_AREA), then sides that grow, and logits, bilinearly; '
                     if config['size_policy'] == 'resize' else 'predict blends the logits of overlapping tiles of '
                     'image_size, those of a whole image differ, the more the smaller these are; ') +
                    'logits above log(t / (1 - t)), t the threshold, are foreground if there is one, else the largest '
                    'is the class'}


def export_pt2(model, path, half, is_free):
    """A torch.export program -> a function that runs it as loaded from the file; sides above 32 pixels."""
    images, free = trace_example(model, is_free)
    program = torch.export.export(model, (images,), dynamic_shapes=free)
    for node in program.graph.nodes:
        node.meta.pop('stack_trace', None)                             # it reveals local paths
    written = io.BytesIO()                                             # on a full disk torch's own writer aborts
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'No complete tensor')        # it takes channels_last for a slice
        torch.export.save(program, written, extra_files=export_facts(model))
    path.write_bytes(written.getbuffer())
    return torch.export.load(path).module()


def export_smp(model, path, half, is_free):
    """smp's own form -> the model with the network that smp.from_pretrained loads."""
    if not hasattr(model.network, 'save_pretrained'):
        raise UserError('format=smp: is for networks of smp, which this one is not; onnx and pt2 take any',
                        'cannot export')
    for weight in model.network.parameters() if half else ():
        weight.data = weight.data.half() if weight.ndim > 1 else weight.data   # those of norms weigh little, and decide
    import safetensors                                                 # smp needs it

    scale = 255 if model.config['image_dtype'] == 'uint8' else 1
    least = ', to {} x {} at least'.format(*model.least) if model.least else ''
    facts = {'mean': (model.mean / scale).flatten().tolist(), 'std': (model.std / scale).flatten().tolist(),
             'input_range': [0, 1] if scale == 255 else None, 'input_space': 'RGB',    # smp divides by 255 for [0, 1]
             'padding': f'zeros below and right of the normalised image, to multiples of {model.stride}{least}; logits '
                        'are cut back to the size before'}
    try:
        model.network.save_pretrained(path)
        write_file(path / 'preprocessing.json', json.dumps(facts | export_facts(model), indent=1).encode())
        model.network = smp.from_pretrained(path).float()
    except safetensors.SafetensorError as error:                       # such as a full disk, or too little memory
        raise OSError(errno.EIO, str(error)) from None
    return model.eval()


# ===== measuring: memory by part, check, tune =========================================


def saved_bytes(model, batch, loss_fn, dtype):
    """Bytes that autograd keeps of one forward pass for the backward pass, and the largest tensor of them.

    Parameters and buffers are not counted; tensors that share storage count once. Works on fake tensors too,
    which know autocast (meta tensors do not).
    """
    kept = {}                      # storage -> tensor, kept alive: freed storages would have their addresses reused

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_loss(loss_fn, model, dtype, batch)
    for own in itertools.chain(model.parameters(), model.buffers()):
        kept.pop(own.untyped_storage()._cdata, None)
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    return sum(sizes), max(sizes, default=0)


def estimate_memory(config, dtype):
    """Bytes by part of one training step, from fake tensors: nothing is computed, and only weights are allocated.

    workspace is a guess: twice the largest activation, for the gradients that flow through it.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    mode, model = FakeTensorMode(), build_model({**config, 'encoder_weights': None}).train()
    device = choose_device(config['device'])
    model = laid_out(model, config, device)                            # copies into a layout are kept too
    fold_upsampling(model, folding_pays(device.type, dtype != 'float32'))      # fake tensors look as if on a CPU
    with FakeCopyMode(mode):                                           # some models cannot be built in fake mode
        model = copy.deepcopy(model)
    with mode, torch.random.fork_rng(devices=[]):                      # those of a GPU torch 2.6 cannot put back here
        shape = (config['batch_size'], config['in_channels'], *config['image_size'])
        batch = {'image': torch.empty(shape, dtype=getattr(torch, config['image_dtype'])),
                 'mask': torch.zeros((shape[0], *shape[2:]), dtype=torch.uint8)}
        activations, largest = saved_bytes(model, batch, SegmentationLoss(config), dtype)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
    per_weight = {'sgd': int(config['momentum'] > 0), 'rmsprop': 1, 'adagrad': 1, 'asgd': 1}
    states = per_weight.get(config['optimizer'].lower(), 2)            # at most: Adafactor keeps less
    return {'weights': weights, 'gradients': weights, 'optimizer states': states * weights,
            'averaged weights': weights if config['ema_decay'] else 0, 'activations': activations,
            'workspace': 2 * largest}


def resident_memory(state):
    """Bytes by part of what stays between two steps, from real tensors."""
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))
    parameters = list(state.model.parameters())
    return {'weights': size(parameters), 'gradients': size(p.grad for p in parameters),
            'optimizer states': size(t for kept in state.optimizer.state.values() for t in kept.values()),
            'averaged weights': size(state.average[0]) if state.average is not None else 0}


def measure_memory(state, batch, loss_fn, peak=0):
    """Bytes by part of a step that has been run; workspace is what its `peak` (bytes) holds beyond the other parts."""
    parts = resident_memory(state)
    parts['activations'], _ = saved_bytes(state.model, to_device(batch, state.device), loss_fn, state.dtype)
    return parts | {'workspace': max(0, peak - sum(parts.values()))}


def describe_memory(parts, how='estimated'):
    """One line: every part and the sum, in MiB."""
    each = ', '.join(f'{part} {size / 2**20:.0f}' for part, size in parts.items())
    return f'memory of one step, {how}: {each}; together {sum(parts.values()) / 2**20:.0f} MiB'


def print_settings(config, sources, why):
    """Every setting, with where its value came from."""
    print('settings:')
    usual = dict(CONFIG)
    validate_config(usual)                                             # as its values are in `config`
    for key, value in config.items():
        found = 'the run' if config['resume'] else 'the usual choice here' if key == 'channels_last' else \
            'initial_weights' if config['initial_weights'] and key in NETWORK_KEYS else 'found in the data'
        origin = found if sources[key] == 'default' and value != usual.get(key) else sources[key]
        print(f'  {key:<28}{clean(repr(value)):<36} {why.get(key) or origin}')


def show_first_batch(dataset, config, device):
    """Print the shapes of the first batch and how fast batches load, and draw it -> the path of the picture."""
    sampler = WindowSampler(len(dataset), config, rarity=dataset.rarity)
    with served_by(build_loader(dataset, config, device, batch_sampler=sampler)) as loader:
        first, batches = next(iter(loader)), iter(loader)
        begun, images = time.monotonic(), 0                            # without the start of the workers
        for batch in batches:
            images += len(batch['image'])
            if time.monotonic() - begun > 5:
                break
        speed = images / max(1e-9, time.monotonic() - begun)           # Windows' clock may stand still for 16 ms
    classes = sorted(set(first['mask'].unique().tolist()) - {IGNORE})
    print(f'first batch: image {tuple(first["image"].shape)} {first["image"].dtype}, '
          f'mask {tuple(first["mask"].shape)} with the classes {classes}\n'
          f'loading: {speed:.3g} images/s with {config["num_workers"]} workers, uncached')
    rows = []
    for index, image, mask in zip(first['index'][:8].tolist(), first['image'], first['mask'].numpy()):
        image, wide = viewable(image.permute(1, 2, 0).numpy()), 1 + 2 * math.ceil(max(mask.shape) / 224)
        outlined = cv2.dilate(mask, np.ones((wide, wide))) != mask
        pictures = image, colour_mask(mask, config['num_classes']), np.where(outlined[..., None], INVENTED, image)
        rows.append((Path(dataset.name(index)).name, [picture.astype(np.uint8) for picture in pictures]))
    path = Path('runs') / 'check' / 'samples.png'
    sheet(rows, ['image as the network sees it', 'mask', 'its outline'], path, colour_key(config, has_errors=False))
    return path


def in_full(problems, path, most=20):
    """All problems, including those behind '... and 5 more'; if these are over `most` they are written to `path`."""
    lines, others = [], []
    for problem in problems:
        hidden = getattr(problem, 'hidden', [problem])
        others += hidden if len(hidden) > most else []
        lines += [f'{problem}, which {path} names'] if len(hidden) > most else hidden
    if others:
        write_file(path, '\n'.join(map(clean, others)).encode())
    return lines


@usual_settings()
def check(preset=None, **overrides):
    """Look at everything a training would use, train nothing -> exit code 0 only if training could start; what would
    then be downloaded (encoder_weights, but for their mean and std) or imported (tensorboard) is not tried."""
    config, sources, notes = resolve_config(preset, overrides)
    validate_config(overrides)                                         # NumPy's and torch's become plain, to be typed
    if folder := find_resume(config, sources['num_epochs'] != 'default'):
        config, sources, notes = resume_config(folder, preset, overrides)
    else:
        config['resume'], folder = None, Path('runs' if config['run_dir'] == 'auto' else config['run_dir'])
        if config['run_dir'] != 'auto':
            refuse_data(config)
            refuse_used(folder)
    refuse_own_data(config, config['resume'] or preset)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f'run_dir={str(folder)!r}: cannot be written: {there} is no folder that takes files')
    device = choose_device(config['device'])
    if (count := processes_started(config)) > 1:
        warn(f'check looks at one process with the whole batch, of which each of the {count} takes a share')
    try:
        with as_learnt(config) if config['resume'] else contextlib.nullcontext():
            config, hardware, precision, data, why = prepare(config, sources, device, decode=True)
    except UserError as error:
        error.problems = in_full(error.problems, Path('runs') / 'check' / 'problems.txt')
        raise
    why |= settle_statistics(config, SegmentationDataset(data, 'train', config, is_training=False))
    train_data = SegmentationDataset(data, 'train', {**config, 'cache_images': False}, is_training=True)
    print_settings(config, sources, why)                               # first, or what follows would scroll away
    print('\n'.join(clean(line) for line in ['', *describe_data(data, config)]))
    tell_detail(SegmentationDataset(data, 'val', config, is_training=False))
    tell_precision(precision, hardware, notes)
    build_class_weights(config, data)
    model = build_model({**config, 'encoder_weights': None})
    try_size(model, data.sizes)
    saved = load_last(folder)[0] if config['resume'] else {'weights': model.state_dict()}
    if saved.get('own_loss') or saved['weights'].keys() != model.state_dict().keys():
        raise UserError(f'{folder}: has a network or loss of your own: go on from Python, with it', 'cannot resume')
    warn_of_size(model, precision)
    build_optimizer(model, config, torch.device('cpu'))
    together = min(config['batch_size'], len(train_data))              # images at once
    parts = estimate_memory({**config, 'batch_size': together}, precision.dtype)
    print(describe_memory(parts))
    if sum(parts.values()) > hardware.memory > 0:
        warn('that is more than is there: a smaller image_size or batch_size or --preset low_memory takes less')
    print(f'what the network will see: {clean(show_first_batch(train_data, config, device))}')
    words = [as_typed(key, value) for key, value in overrides.items()]
    words = [f'--preset {quoted(preset)}', *words] if preset else words
    print('ready:', command_line(*words))
    return 0


@dataclasses.dataclass
class Candidate:
    """One way to run a step, and what was measured of it."""
    dtype: str
    tf32: str
    channels_last: bool
    state: TrainState
    compiled: object = None        # what nn.Module.compile made of the model's call; None: eager
    seconds: list = dataclasses.field(default_factory=list)
    memory: int = 0                # peak bytes on the device; 0 where it cannot be measured
    compile_seconds: float = 0.0

    @property
    def name(self):
        """As the table shows it."""
        precision = 'TF32' if self.dtype == 'float32' and self.tf32 != 'highest' else self.dtype
        return precision + ', channels_last' * self.channels_last + ', compiled' * bool(self.compiled)

    @property
    def median(self):
        """Seconds of a step."""
        return float(np.median(self.seconds))

    @property
    def cost(self):
        """What the winner has least of: seconds of a step, plus 3 % for float16, which can overflow."""
        return self.median * (1.03 if self.dtype == 'float16' else 1)


@usual_settings()
def tune(preset=None, seconds=60.0, **overrides):
    """Measure every precision the hardware has with the real training step, and write the winner as a preset.

    Interleaved rounds without the compiler, then with it, together for about 1.5 x `seconds`. Only the preset file is
    kept.
    """
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ConfigError([f'seconds={shown(seconds)}: must be a number above 0'])
    config, sources, notes = resolve_config(preset, overrides, found=idle_settings('tune', overrides))
    validate_config(overrides)                                         # as in check
    refuse_own_data(config, preset)
    device = choose_device(config['device'])
    config, hardware, precision, data, _ = prepare(config, sources, device)
    warn(*notes, *precision.warnings)
    settle_statistics(config, SegmentationDataset(data, 'train', config, is_training=False))
    dataset = SegmentationDataset(data, 'train', config, is_training=True)
    loss_fn = SegmentationLoss(config, build_class_weights(config, data))
    sampler = WindowSampler(len(dataset), config, rarity=dataset.rarity)
    window = load_batches(dataset, sampler.micro_batches(sampler.windows()[0]), config, device)
    height, width = config['image_size']
    print(f'{hardware.describe()}; {config["architecture"]} {config["encoder"]}, {width} x {height}, '
          f'batch {config["batch_size"]} x {config["accumulation_steps"]}')
    for dtype in sorted({'bfloat16', 'float16'} - hardware.units):
        print(f'not measured: {dtype}, {hardware.name} has no units for it' +
              (' (autocast would be several times slower than float32)' if hardware.kind == 'cpu' else ''))
    apply_tf32('highest')                                              # the reference is exact float32
    torch.use_deterministic_algorithms(config['deterministic'], warn_only=True)
    candidates = plain_candidates(config, hardware, device)
    model, dtypes = candidates[0].state.model, {c.dtype for c in candidates} - {'float32'}
    warn_of_size(model, precision)
    examine = functools.partial(examine_numbers, model, config, loss_fn, sorted(dtypes))
    numbers, *_ = in_halves(examine, window[0])                        # of the first part that fits into memory
    safe = [c for c in candidates if not judge(c.dtype, numbers)]      # only these may win
    images = sum(batch_length(batch) for batch in window)
    measure_rounds(candidates, window, loss_fn, config, seconds / 2)
    print_speeds(candidates, images)                                   # now: the compiler can take minutes
    with torch._dynamo.config.patch(cache_size_limit=64):              # else the ninth silently stays eager
        if compiled := compile_all(safe, config, device, window, loss_fn):
            measure_rounds(candidates + compiled, window, loss_fn, config, seconds)
            compiled.sort(key=lambda c: c.cost)
            print_speeds(candidates + compiled, images)
    best = min(safe, key=lambda c: c.cost)
    print_numbers(numbers)
    if judge('float16', numbers):
        print('refuted here: preset older_gpu asks for float16')
    winner = pick_winner(best, next(iter(compiled), None), config, len(dataset), images)
    del candidates, model, safe, examine, best, compiled               # their weights would be measured as well
    gc.collect()                                                       # compiled models are in reference cycles
    torch.cuda.empty_cache()
    try:
        tell_waiting(winner, dataset, loss_fn, config)
        tell_memory(winner, config, hardware, window, loss_fn)
    finally:                                                           # keep the result of minutes of measuring
        base = translate(load_preset(preset), [])[0] if preset is not None else {}
        write_winner(winner, hardware, images, base, overrides)
    return 0


def tell_waiting(candidate, dataset, loss_fn, config, seconds=10):
    """Print the share of the time that real steps, fed by the loader as in training, wait for data. All images are read
    once before, which fills the cache if there is one."""
    effective = config['batch_size'] * config['accumulation_steps']
    count = min(len(dataset), max(200, 2 * effective)) // effective * effective        # windows of one length
    sampler = WindowSampler(count or len(dataset), config)
    with served_by(build_loader(dataset, config, candidate.state.device, batch_sampler=sampler)) as loader:
        for _ in loader:
            pass
        begun, busy, steps = 0.0, 0.0, progress(windows(loader, sampler), sampler.num_windows, 'Watching the loader')
        for number, (_, window) in enumerate(steps):
            begun = begun or time.monotonic()                          # without the start of the workers
            busy += timed_step(candidate, window, loss_fn, config)
            if time.monotonic() - begun > seconds:
                break
        share = 1 - busy / (time.monotonic() - begun)
    print(f'waiting for data: {share:.1%} of the time of {number + 1} steps in {candidate.name}, '
          f'num_workers={config["num_workers"]}')


def plain_candidates(config, hardware, device):
    """Every precision that the hardware has, in both memory layouts; those of one layout share their weights, and all
    start from the same."""
    kinds = [('float32', 'highest'), ('float32', 'high')] if 'tf32' in hardware.units else [('float32', 'highest')]
    kinds += [(dtype, 'high') for dtype in ('float16', 'bfloat16') if dtype in hardware.units]
    config, states = config | {'encoder_weights': None, 'learning_rate': 1e-6}, {}         # small: must not diverge
    for last in (False, True) if device.type != 'mps' else (False,):   # see laid_out
        seed_everything(config['seed'])
        layout = config | {'channels_last': last}
        states[last] = build_state(build_model(layout), layout, Precision('float32', None, ''), device)
    return [Candidate(dtype, tf32, last, dataclasses.replace(
        state, dtype=dtype, scaler=build_scaler(dtype, config, device)))
        for dtype, tf32 in kinds for last, state in states.items()]


def timed_step(candidate, window, loss_fn, config):
    """Run one real step -> its seconds, with the device synchronised. Also notes the candidate's peak memory."""
    apply_tf32(candidate.tf32)
    candidate.state.model._compiled_call_impl = candidate.compiled
    device = candidate.state.device
    getattr(torch, device.type).synchronize()
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - sum(resident_memory(candidate.state).values())
    begun = time.perf_counter()
    guarded_step(candidate.state, window, loss_fn, config)
    getattr(torch, device.type).synchronize()
    if device.type == 'cuda':
        before = candidate.memory if candidate.compiled else 0         # a CUDA graph takes its memory once
        candidate.memory = max(before, torch.cuda.max_memory_allocated(device) - others)
    return time.perf_counter() - begun


def measure_rounds(candidates, window, loss_fn, config, seconds):
    """Time all candidates in 1 to 20 interleaved rounds, about `seconds` in all, so that a slow minute of the machine
    hits them alike. Earlier times, from other minutes, are dropped."""
    begun = time.monotonic()
    for candidate in candidates:
        candidate.seconds = []
    for number in progress(range(21), 21, 'Measuring'):
        for candidate in candidates:
            took = timed_step(candidate, window, loss_fn, config)
            if number:                                                 # the first round warms up
                candidate.seconds.append(took)
        if number and time.monotonic() - begun > seconds * (1 if number >= 3 else 2):
            break


COMPILE_SECONDS = {'cpu': 180, 'cuda': 300}    # after which tune begins to compile no other candidate


def compile_all(candidates, config, device, window, loss_fn):
    """Every candidate once more, compiled, while time lasts -> those of them with which torch.compile works."""
    compiled, waiting = [], sorted(candidates, key=lambda c: c.cost)   # likely winners first
    ends = time.monotonic() + COMPILE_SECONDS.get(device.type, 120)
    while waiting and time.monotonic() < ends:
        plain = waiting.pop(0)
        print(f'compiling {plain.name} ...', flush=True)
        try_to_compile(plain.state, loss_fn, config)
        one = dataclasses.replace(plain, compiled=plain.state.model._compiled_call_impl, seconds=[], memory=0)
        one.compile_seconds = timed_step(one, window, loss_fn, config)
        if is_compiled(plain.state.model):                             # else it failed, and was logged
            compiled.append(one)
    if waiting:
        print('not compiled, for want of time:', '; '.join(c.name for c in waiting))
    return compiled


def examine_numbers(model, config, loss_fn, dtypes, batch):
    """How far each dtype is from float32 on this network and data -> {'peak', 'layer': the largest activation and
    where it is, 'lost': the share of gradient values that float16 would round to 0 unscaled,
    'gradients': {dtype: (cosine, norm ratio)} against float32}."""
    model.train()
    peak, in_float32 = {}, {}

    def watch(name, module, inputs, output):
        are_floats = lambda value: torch.is_tensor(value) and value.is_floating_point()
        of_inputs, of_output = (list(filter(are_floats, pytree.tree_leaves(values))) for values in (inputs, output))
        if isinstance(module, Float32):                                # not counted, nor if an outer module returns it
            of_inputs = []
            in_float32.update({id(tensor): tensor for tensor in of_output})
        for place, tensors in ((f'the input of {name}', of_inputs), (name, of_output)):
            for value in tensors if name else ():
                if id(value) not in in_float32:
                    peak[place] = max(peak.get(place, 0.0), float(value.detach().abs().max()))

    batch = to_device(batch, next(model.parameters()).device)

    def gradient(dtype, scale=1.0):
        model.zero_grad(set_to_none=True)
        seed_everything(config['seed'])                                # the same dropout for each dtype
        losses, _ = run_loss(loss_fn, model, dtype, batch)
        (losses.mean() * scale).backward()
        whole = flat(p.grad for p in model.parameters() if p.grad is not None).cpu().double() / scale
        return gradient(dtype, scale / 2) if scale > 1 and not torch.isfinite(whole).all() else whole    # as the scaler

    with contextlib.ExitStack() as after:
        for name, module in model.named_modules():                     # after the hooks that are there
            after.enter_context(module.register_forward_hook(functools.partial(watch, name)))
        truth = gradient('float32')
    layer = max(peak, key=peak.get)
    lost = float(((truth != 0) & (truth.abs() < 2.0 ** -25)).sum() / (truth != 0).sum().clamp_min(1))
    numbers = {'peak': peak[layer], 'layer': layer, 'lost': lost, 'gradients': {}}
    for dtype in dtypes:
        other = gradient(dtype, config['init_scale'] if dtype == 'float16' else 1.0)
        cosine, ratio = F.cosine_similarity(truth, other, dim=0), other.norm() / truth.norm()
        numbers['gradients'][dtype] = float(cosine), float(ratio)
    return numbers


def judge(dtype, numbers):
    """Why a dtype is unsafe for this network, '' if it is not: float16 with an activation above half of what it can
    hold, or a gradient that points elsewhere than float32's."""
    if dtype == 'float16' and numbers['peak'] > torch.finfo(torch.float16).max / 2:
        return f'float16 is unsafe here: {numbers["layer"]} reaches {numbers["peak"]:.3g}; float16 ends at 65,504'
    cosine, _ = numbers['gradients'].get(dtype, (1.0, 1.0))
    what = 'is not finite' if math.isnan(cosine) else f'has a cosine of {cosine:.3f} with float32\'s'
    return '' if cosine > 0.9 else f'{dtype} is unsafe here: its gradient {what}'


def print_speeds(candidates, images):
    """Print the table of what was measured so far, with speeds relative to the first candidate."""
    print(f'\n{"":<34}{"images/s":>9}{"against":>9}{"peak":>10}\n{"":<34}{"median":>9}{"float32":>9}{"memory":>10}')
    for c in candidates:
        memory = f'{c.memory / 2**20:.0f} MiB' if c.memory else '-'
        speed, ratio = images / c.median, candidates[0].median / c.median
        print(f'{c.name:<34}{speed:>9.1f}{ratio:>8.2f}x{memory:>10}')
    rounds = counted(len(candidates[-1].seconds), 'round')
    print(f'{rounds}, interleaved; first window of the training images, new weights\n', flush=True)


def print_numbers(numbers):
    """The numeric side, see examine_numbers."""
    print(f'largest activation {numbers["peak"]:.3g} in {numbers["layer"]} (float16 ends at 65,504); '
          f'{numbers["lost"]:.2%} of the gradient values would be 0 in unscaled float16')
    for reason in filter(None, (judge(dtype, numbers) for dtype in ('float16', 'bfloat16'))):
        print(reason)
    for dtype, (cosine, ratio) in numbers['gradients'].items():
        print(f'gradient in {dtype} against float32: cosine {cosine:.5f}, norm ratio {ratio:.4f}')


def pick_winner(best, compiled, config, count, images):
    """The compiled candidate if compiling it pays back, against the best eager one, within the run's epochs of `count`
    images; else `best`, and a line that advises against preset fast."""
    why = 'it does not work here, or not in time'
    if compiled is not None:
        early = config['progressive_resizing'] / 2                     # about what half-size steps save; not compiled
        saved = (best.median * (1 - early) - compiled.median) * max(1, count // images)
        payback = math.ceil(compiled.compile_seconds / saved) if saved > 0 else math.inf
        when = f'pays back after {payback} epochs of {count} images' if saved > 0 else 'never pays back'
        print(f'compiling took {compiled.compile_seconds:.0f} s and {when}')
        if payback < config['num_epochs']:
            return compiled
        why = f'it does not pay back within your {config["num_epochs"]} epochs'
    print(f'refuted here: preset fast asks for compile; {why}')
    return best


def write_winner(winner, hardware, images, base, overrides):
    """The winner as a preset file on top of `base`, and the line that uses it."""
    settings = amp_settings(winner.dtype) | {
        'tf32_matmul_precision': winner.tf32, 'channels_last': winner.channels_last,
        'compile_model': bool(winner.compiled)}
    heading = f'Measured by tune on {hardware.name}: {winner.name}, {images / winner.median:.1f} images/s.'
    path = Path('runs') / 'tuned.py'
    write_file(path, f'"""{heading}"""\nconfig = {pprint.pformat(base | settings, sort_dicts=False)}\n'.encode())
    words = [as_typed(key, value) for key, value in overrides.items()
             if SHORT_NAMES.get(key, key) not in settings and key not in FOREIGN]
    print(f'best here: {winner.name}\nuse it with: ', command_line('--preset', quoted(path), *words))


def tell_memory(winner, config, hardware, window, loss_fn):
    """The memory of a step by part, estimated and measured, and the largest power of two that fits as a batch: tried
    on a GPU, estimated for 90 % of a CPU's memory."""
    config = {**config, 'batch_size': winner.state.batch_size}         # memory may have halved it
    print(describe_memory(estimate_memory(config, winner.dtype)))
    first, *_ = split_batch(window[0], config['batch_size'])
    measured = measure_memory(winner.state, first, loss_fn, winner.memory)
    print(describe_memory(measured, 'measured' if winner.memory else 'measured but for its workspace'))
    one = to_device({key: first[key][:1] for key in ('image', 'mask')}, winner.state.device)

    def attempt(batch):                                                # without an update a scaler unscales only once
        winner.state.scaler = build_scaler(winner.dtype, config, winner.state.device)
        return train_step(winner.state, [batch], loss_fn, config)

    def runs(size):
        winner.state.batch_size = size
        return len(in_halves(attempt, {key: x.expand(size, *x.shape[1:]) for key, x in one.items()})) == 1

    fits, how, size = runs, 'tried', 1
    if hardware.kind == 'cpu':                                         # the estimate is linear in the batch size
        two, four = (sum(estimate_memory({**config, 'batch_size': n}, winner.dtype).values()) for n in (2, 4))
        fits, how = lambda size: two + (size - 2) * (four - two) / 2 < 0.9 * hardware.memory, 'estimated'
    forget_compiled(winner.state.model)                                # eager, or each size would be compiled
    torch.cuda.empty_cache()
    while size < 4096 and fits(2 * size):
        size *= 2
    print(f'largest batch_size that fits into {hardware.memory / 2**30:.0f} GiB: {size} ({how})')


# ===== command line ===================================================================


def main(argv=None):
    """Run one command -> exit code: 0 done, 2 what you can mend, 1 failed, 128 + n stopped by signal n."""
    argv, level, verb = sys.argv[1:] if argv is None else argv, log.level, 'train'
    for stream in (sys.stdout, sys.stderr):                            # Windows' encodings lack most letters
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors='backslashreplace')
    after = contextlib.ExitStack()                                     # a notebook's %run goes on afterwards
    after.callback(setattr, warnings, 'showwarning', warnings.showwarning)
    warnings.showwarning = lambda message, *_, **__: log.warning('%s', message)    # cleaned: a file may quote itself
    try:
        verb, paths, preset, overrides, own, output = parse_command(argv)
        for name in ('SIGTERM', 'SIGHUP') if __name__ == '__main__' and verb != 'train' else ():
            number = getattr(signal, name, None)                       # nohup ignores SIGHUP, Windows has none
            if number and signal.getsignal(number) == signal.SIG_DFL:  # exits through finally: no half-written file
                after.callback(signal.signal, number, signal.signal(number, lambda number, _: sys.exit(128 + number)))
        if verb == 'train':
            result = train(preset, **overrides)
            return 128 + result.stopped_by if result.stopped_by else int(not result.is_saved)
        if is_follower():                                              # torchrun's first process does the rest alone
            return 0
        if verb == 'evaluate':
            evaluate(paths[0], **own, **overrides)
            return 0
        if verb == 'predict':
            return predict(paths[0], paths[1:], output, **own, **overrides)
        if verb == 'export':
            return export(paths[0], own.get('format', 'onnx'), output, own.get('half', False))
        if verb == 'tune':
            log.setLevel(logging.WARNING)                              # its table says it all
        return {'check': check, 'tune': tune}[verb](preset, **overrides)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        if verb == 'train':                                            # the first process does the rest alone
            meet_late()
        return getattr(error, 'exit_code', 2)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130
    except SystemExit as error:                                        # --help, or a signal with nothing to save yet
        if type(error.code) is int and error.code > 128:
            print(f'stopped by {signal.Signals(error.code - 128).name}', file=sys.stderr)
        return error.code
    except BrokenPipeError:                                            # such as a pipe into head
        return 1
    except (Rewind, RuntimeError, MemoryError) as error:
        if world().size > 1 and re.search(GONE, str(error)):
            print(f'process {world().rank}: another one has ended; unless it was killed it says why', file=sys.stderr)
            return 1
        if not is_out_of_memory(error):
            raise
        print(UserError(TOO_LARGE, 'out of memory'), file=sys.stderr)
        return 2
    except OSError as error:                                           # no permission, no space, a folder for a file
        print(f'{clean(error.filename or "a file")}: {error.strerror or in_words(error)}', file=sys.stderr)
        return 2
    finally:
        log.setLevel(level)
        after.close()


if __name__ == '__main__':
    sys.exit(main())
