"""The two loops that the benchmarks compare: the plain one of the smp examples, and train_unet's.

Shared by limit.py, memory.py, scale.py, large_image.py and gpu.py.
"""
import itertools
import os

import common  # noqa: F401  lets train_unet be found
import albumentations as A
import cv2
import numpy as np
import segmentation_models_pytorch as smp
import torch

import train_unet


class PathDataset(torch.utils.data.Dataset):
    """Lists of paths, decoded and resized when asked: what a user writes first. No augmentation."""

    def __init__(self, images, masks, size, num_classes=2):
        self.images, self.masks, self.num_classes = images, masks, num_classes
        self.transform = A.Resize(*size)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = cv2.cvtColor(cv2.imread(self.images[index]), cv2.COLOR_BGR2RGB)
        mask = cv2.imread(self.masks[index], cv2.IMREAD_GRAYSCALE)
        sample = self.transform(image=image, mask=mask)
        image = sample['image'].transpose(2, 0, 1).astype(np.float32) / 255
        if self.num_classes == 2:
            return image, (sample['mask'] > 127).astype(np.float32)[None]
        return image, sample['mask'].astype(np.int64)


def read_batches(dataset, batch_size, workers=0, pinned=False):
    """A shuffling DataLoader without end; its workers live on, as far ahead as train_unet's."""
    if len(dataset) < batch_size:
        raise SystemExit(f'{len(dataset)} training images make no batch of {batch_size}: type a smaller --batch')
    ahead = {'persistent_workers': True, 'prefetch_factor': 4} if workers else {}
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, num_workers=workers,
                                         drop_last=True, pin_memory=pinned, **ahead)
    return itertools.chain.from_iterable(itertools.repeat(loader))


class Plain:
    """The loop of the smp examples: Adam 2e-4, Dice over the batch, NCHW; `dtype` adds autocast,
    `is_tuned` what a skilled user would: channels_last, fused Adam, cuDNN's search, batches sent
    without waiting."""

    def __init__(self, batches, device, num_classes=2, dtype='float32', is_tuned=False, **network):
        self.batches, self.device, self.is_tuned = batches, torch.device(device), is_tuned
        self.dtype, binary = getattr(torch, dtype), num_classes == 2
        self.model = smp.Unet(encoder_weights=None, classes=1 if binary else num_classes, **network)
        self.layout = torch.channels_last if is_tuned else torch.contiguous_format
        self.model.to(self.device, memory_format=self.layout)
        self.loss = smp.losses.DiceLoss('binary' if binary else 'multiclass', from_logits=True,
                                        ignore_index=None if binary else 255)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-4, fused=is_tuned or None)

    def step(self):
        """One batch, forth and back -> images seen."""
        torch.backends.cudnn.benchmark = self.is_tuned                 # as torch comes; ours may run beside it
        images, masks = (value.to(self.device, non_blocking=self.is_tuned)
                         for value in next(self.batches))
        images = images.contiguous(memory_format=self.layout)
        self.model.train()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss(self.model(images), masks)
        loss.backward()
        self.optimizer.step()
        return len(images)


class OurData:
    """train_unet's own data set, sampler and loader; `settings` are its keys."""

    def __init__(self, preset=None, **settings):
        config, sources, _ = train_unet.resolve_config(preset, settings)
        self.device = train_unet.choose_device(config['device'])
        config, self.hardware, self.precision, self.data, _ = train_unet.prepare(
            config, sources, self.device)
        self.dataset = train_unet.SegmentationDataset(self.data, 'train', config, is_training=True)
        train_unet.settle_statistics(config, self.dataset)
        self.config, self.sampler = config, train_unet.WindowSampler(len(self.dataset), config)
        self.loader = train_unet.build_loader(self.dataset, config, self.device,
                                              batch_sampler=self.sampler)
        self.windows = self.read_windows()

    def read_windows(self):
        """The windows of one epoch after another."""
        for self.sampler.epoch in itertools.count():
            for _, window in train_unet.windows(self.loader, self.sampler):
                yield window

    def as_paths(self):
        """The PathDataset of the same training files, at the same size."""
        pairs = self.data.pairs
        images, masks = ([os.fsdecode(path) for path in paths[self.dataset.rows]]
                         for paths in (pairs.images, pairs.masks))
        return PathDataset(images, masks, self.config['image_size'], self.config['num_classes'])


class Ours(OurData):
    """... with model, loss and optimizer, put together as its training does."""

    def __init__(self, preset=None, **settings):
        super().__init__(preset, **settings)
        config, self.searches = self.config, torch.backends.cudnn.benchmark
        train_unet.seed_everything(config['seed'])
        train_unet.apply_tf32(config['tf32_matmul_precision'])
        weights = train_unet.build_class_weights(config, self.data)
        self.loss_fn = train_unet.SegmentationLoss(config, weights)
        model = train_unet.build_model(config)
        self.state = train_unet.build_state(model, config, self.precision, self.device)
        if config['compile_model']:
            train_unet.try_to_compile(self.state, self.loss_fn, config)

    def step(self):
        """One window with everything that guards it -> images seen."""
        torch.backends.cudnn.benchmark = self.searches                 # a plain loop beside it does without
        window = next(self.windows)
        train_unet.guarded_step(self.state, window, self.loss_fn, self.config)
        return sum(train_unet.batch_length(batch) for batch in window)
