"""The contenders of images_per_second.py: the same training, each in the words of its framework.

Every function trains EPOCHS epochs of job.steps batches. Equal for all: smp.Unet with the job's
encoder from scratch and one output, images of job.folder at job.size, batch, AdamW, cross-entropy
plus Dice, job.dtype, no augmentation. 'documented' is what the framework's own documentation tells a
user to write; 'tuned' adds channels_last and fused AdamW, and what its users add besides. With
job.loaded the images are files and the IoU of the training batches is computed; without it the
batches are tensors in memory and there is no metric. Nobody is compiled, and of the peers only
MONAI tuned keeps the images of files; ours does in 'default' and 'auto'.
"""
import dataclasses
import functools
from pathlib import Path

import common                     # which finds train_unet too
import cv2
import segmentation_models_pytorch as smp
import torch
from torch import nn

EPOCHS = 2          # the first warms up (caches, allocator, workers); only the second is measured
RATE = 1e-3
IMAGENET = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}


@dataclasses.dataclass
class Job:
    """One training to be timed."""
    contender: str
    variant: str    # 'documented' or 'tuned'; of ours 'equal' (work of the peers), 'default' or 'auto'
    encoder: str
    folder: str     # images/{train,val} and masks/{train,val}
    size: int
    batch: int
    steps: int
    device: str
    seed: int
    loaded: bool = True
    frugal: bool = False     # reads without workers, as ours does on a CPU
    dtype: str = 'float32'   # or 'bfloat16'

    @property
    def tuned(self):
        return self.variant == 'tuned'

    @property
    def mixed(self):
        return self.dtype != 'float32'

    def autocast(self):
        return torch.autocast(torch.device(self.device).type, getattr(torch, self.dtype), enabled=self.mixed)

    @property
    def layout(self):
        return torch.channels_last if self.tuned else torch.contiguous_format


# ------------------------------------------------------------------------- what peers share


def list_pairs(folder, split='train'):
    """Sorted paths of images and of masks."""
    kinds = [sorted((Path(folder) / kind / split).iterdir()) for kind in ('images', 'masks')]
    return list(zip(*kinds))


class FolderDataset(torch.utils.data.Dataset):
    """Images in 0..1 (3, H, W) and masks (1, H, W), read, resized and scaled when asked for."""

    def __init__(self, folder, size):
        self.pairs, self.size = list_pairs(folder), (size, size)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        image, mask = (str(path) for path in self.pairs[index])
        image = cv2.resize(cv2.cvtColor(cv2.imread(image), cv2.COLOR_BGR2RGB), self.size)
        mask = cv2.imread(mask, cv2.IMREAD_GRAYSCALE)
        mask = cv2.resize(mask, self.size, interpolation=cv2.INTER_NEAREST) > 127
        image = torch.from_numpy(image).permute(2, 0, 1).float() / 255
        return image, torch.from_numpy(mask)[None].float()


def build_loader(job, collate=lambda images, masks: (images, masks)):
    """Files through worker processes, or the same batches as tensors in memory."""
    dataset = FolderDataset(job.folder, job.size)
    if job.loaded:
        more = {'persistent_workers': True, 'pin_memory': job.device != 'cpu'} if job.tuned else {}
        how = {'num_workers': 0} if job.frugal else {'num_workers': common.count_workers(), **more}
        return torch.utils.data.DataLoader(dataset, job.batch, shuffle=True, **how)
    batches = [collate(*batch) for batch in torch.utils.data.DataLoader(dataset, job.batch)]
    return torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)


class Network(nn.Module):
    """smp's network behind ImageNet's normalisation, as in the smp examples."""

    def __init__(self, network):
        super().__init__()
        for name, values in IMAGENET.items():
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))
        self.model = network

    def forward(self, images):
        return self.model((images - self.mean) / self.std)


def build_network(job):
    """The network alone."""
    return smp.Unet(job.encoder, encoder_weights=None, classes=1)


class Loss(nn.Module):
    """Dice plus cross-entropy from smp."""

    def __init__(self):
        super().__init__()
        self.dice = smp.losses.DiceLoss('binary', from_logits=True)
        self.entropy = smp.losses.SoftBCEWithLogitsLoss()

    def forward(self, logits, masks):
        return self.dice(logits, masks) + self.entropy(logits, masks)


def build_optimizer(job, parameters):
    """AdamW, fused if tuned."""
    return torch.optim.AdamW(parameters, lr=RATE, **({'fused': True} if job.tuned else {}))


def count_pixels(logits, masks):
    """tp, fp, fn, tn per image."""
    probabilities = logits.detach().sigmoid()
    return smp.metrics.get_stats(probabilities, masks.long(), mode='binary', threshold=0.5)


def micro_iou(stats):
    """IoU over all pixels of a list of count_pixels."""
    return smp.metrics.iou_score(*map(torch.cat, zip(*stats)), reduction='micro').item()


# ------------------------------------------------------------------------- the contenders


def ours(job):
    """train_unet.train with files; its epoch function (train_epoch) on tensors in memory."""
    import train_unet
    equal = train_unet.amp_settings(job.dtype)
    variant = {'equal': {'ema_decay': None, 'grad_clip': None, 'cache_images': False, **equal},
               'default': equal, 'auto': {}}[job.variant]
    settings = {'data': job.folder, 'image_size': job.size, 'batch_size': job.batch,
                'architecture': 'Unet', 'encoder': job.encoder, 'encoder_weights': None,
                'decoder_channels': [256, 128, 64, 32, 16], 'augment': 'none', 'loss': 'ce+dice',
                'optimizer': 'AdamW', 'learning_rate': RATE, 'num_epochs': EPOCHS,
                'device': job.device, 'seed': job.seed, **variant}
    if job.loaded:
        train_unet.train(run_dir='run', **settings)
        return
    config, sources, _ = train_unet.resolve_config(None, settings)
    device = train_unet.choose_device(job.device)
    config, _, precision, data, _ = train_unet.prepare(config, sources, device)
    dataset = train_unet.SegmentationDataset(data, 'train', config, is_training=True)
    train_unet.settle_statistics(config, dataset)
    train_unet.apply_tf32(config['tf32_matmul_precision'])
    loss = train_unet.SegmentationLoss(config)

    def without_counts(model, batch):
        return loss.losses(model(batch['image']), batch['mask'].long())

    state = train_unet.build_state(train_unet.build_model(config), config, precision, device)
    sampler = train_unet.WindowSampler(len(dataset), config)

    class Batches(list):
        """What the loader gives, in memory."""
        batch_sampler = sampler

    batches = Batches(train_unet.collate([dataset[key] for key in keys]) for keys in sampler)
    batches.dataset, run = dataset, train_unet.Run('run')
    for state.epoch in range(EPOCHS):
        state.window = 0
        train_unet.train_epoch(state, batches, without_counts, config, run)


def plain(job):
    """A plain PyTorch loop, as in the smp examples."""
    device, loader, criterion = torch.device(job.device), build_loader(job), Loss()
    model = Network(build_network(job)).to(device, memory_format=job.layout)
    optimizer = build_optimizer(job, model.parameters())
    for _ in range(EPOCHS):
        model.train()
        total, stats = 0.0, []
        for images, masks in loader:
            images = images.to(device, non_blocking=job.tuned).contiguous(memory_format=job.layout)
            masks = masks.to(device, non_blocking=job.tuned)
            optimizer.zero_grad()
            with job.autocast():
                logits = model(images)
                loss = criterion(logits, masks)
            loss.backward()
            optimizer.step()
            total += loss.detach() if job.tuned else loss.item()
            if job.loaded:
                stats.append(count_pixels(logits, masks))
        if job.loaded:
            print(float(total), micro_iou(stats))


def lightning(job):
    """Lightning with smp: counts in every step, IoU at the epoch's end, as in the smp examples; logged as often
    as its defaults do."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.criterion, self.stats = Network(build_network(job)), Loss(), []

        def training_step(self, batch, number):
            images, masks = batch
            logits = self.network(images.contiguous(memory_format=job.layout))
            loss = self.criterion(logits, masks)
            if job.loaded:
                self.log('train_loss', loss)
                self.stats.append(count_pixels(logits, masks))
            return loss

        def on_train_epoch_end(self):
            if self.stats:
                self.log('train_iou', micro_iou(self.stats))
            self.stats.clear()

        def configure_optimizers(self):
            return build_optimizer(job, self.parameters())

    module = Module().to(memory_format=job.layout)
    accelerator = {'cuda': 'gpu'}.get(job.device, job.device)
    more = {'precision': 'bf16-mixed'} if job.mixed else {}
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator=accelerator, devices=1, **more)
    trainer.fit(module, build_loader(job))


def fastai(job):
    """A fastai Learner; files through its DataBlock; tuned: its ChannelsLast callback. Its own JaccardCoeff wants an
    output for each class; the IoU here is the mean of the batches', as it averages any metric of training."""
    from fastai.callback.channelslast import ChannelsLast
    from fastai.vision.all import (DataBlock, DataLoaders, FuncSplitter, ImageBlock,
                                   IntToFloatTensor, Learner, MaskBlock, Normalize, OptimWrapper,
                                   Resize, get_image_files, imagenet_stats)
    device = torch.device(job.device)
    if job.loaded:
        masks = {str(image): mask for split in ('train', 'val')
                 for image, mask in list_pairs(job.folder, split)}
        block = DataBlock((ImageBlock, MaskBlock), get_items=get_image_files,
                          get_y=lambda path: masks[str(path)],
                          splitter=FuncSplitter(lambda path: path.parent.name == 'val'),
                          item_tfms=Resize(job.size, method='squish'),
                          batch_tfms=[IntToFloatTensor(div_mask=255),
                                      Normalize.from_stats(*imagenet_stats)])
        loaders = block.dataloaders(Path(job.folder) / 'images', bs=job.batch, device=device,
                                    num_workers=0 if job.frugal else common.count_workers())
    else:
        loader = build_loader(job)
        loaders = DataLoaders(loader, loader, device=device)
    criterion = Loss()

    def loss(logits, masks):
        return criterion(logits, masks.view_as(logits).float())

    def iou(logits, masks):
        return micro_iou([count_pixels(logits, masks.view_as(logits))])

    adamw = functools.partial(torch.optim.AdamW, **({'fused': True} if job.tuned else {}))
    network = build_network(job) if job.loaded else Network(build_network(job))  # its Normalize is no layer
    learner = Learner(loaders, network, loss_func=loss, metrics=[iou] if job.loaded else [],
                      opt_func=functools.partial(OptimWrapper, opt=adamw),
                      cbs=[ChannelsLast()] if job.tuned else [])
    if job.mixed:
        learner.to_bf16()
    learner.recorder.train_metrics = job.loaded
    learner.fit_one_cycle(EPOCHS, RATE)


def monai(job):
    """MONAI's SupervisedTrainer with its transforms, loss and metric; tuned: its CacheDataset, and tensors
    without meta data, as its guide to fast training tells."""
    from monai.data import CacheDataset, DataLoader, Dataset, PILReader
    from monai.engines import SupervisedTrainer
    from monai.engines.utils import default_prepare_batch
    from monai.handlers import MeanIoUHandler, StatsHandler, from_engine
    from monai.inferers import SimpleInferer
    from monai.losses import DiceCELoss
    from monai.transforms import (Activationsd, AsDiscreted, Compose, EnsureChannelFirstd,
                                  EnsureTyped, LoadImaged, Resized, ScaleIntensityd)
    if job.loaded:
        keys = ('image', 'label')
        steps = Compose([
            LoadImaged('image', reader=PILReader(converter=lambda image: image.convert('RGB'))),
            LoadImaged('label', reader=PILReader(converter=lambda image: image.convert('L'))),
            EnsureChannelFirstd(keys), ScaleIntensityd(keys),
            Resized(keys, (job.size, job.size), mode=('bilinear', 'nearest')),
            *[EnsureTyped(keys, track_meta=False)] * job.tuned])
        files = [dict(zip(keys, pair)) for pair in list_pairs(job.folder)]
        dataset = CacheDataset(files, steps, progress=False) if job.tuned else Dataset(files, steps)
        loader = DataLoader(dataset, batch_size=job.batch, shuffle=True,
                            num_workers=0 if job.tuned else common.count_workers())
    else:
        loader = build_loader(job, lambda images, masks: {'image': images, 'label': masks})

    def prepare_batch(*arguments, **named):
        images, masks = default_prepare_batch(*arguments, **named)
        return images.contiguous(memory_format=job.layout), masks

    network = Network(build_network(job)).to(job.device, memory_format=job.layout)
    after = Compose([Activationsd('pred', sigmoid=True), AsDiscreted('pred', threshold=0.5)])
    metric = {'train_iou': MeanIoUHandler(output_transform=from_engine(['pred', 'label']))}
    told = StatsHandler(tag_name='train_loss', output_transform=from_engine(['loss'], first=True))
    judged = {'postprocessing': after, 'key_train_metric': metric, 'train_handlers': [told]}
    SupervisedTrainer(
        device=torch.device(job.device), max_epochs=EPOCHS, train_data_loader=loader,
        network=network, optimizer=build_optimizer(job, network.parameters()),
        loss_function=DiceCELoss(sigmoid=True), inferer=SimpleInferer(),
        prepare_batch=prepare_batch, optim_set_to_none=job.tuned, decollate=job.loaded, amp=job.mixed,
        amp_kwargs={'dtype': torch.bfloat16} if job.mixed else None,
        **(judged if job.loaded else {})).run()


def accelerate(job):
    """The plain loop through Hugging Face Accelerate."""
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=job.device == 'cpu', mixed_precision='bf16' if job.mixed else 'no')
    model, criterion = Network(build_network(job)).to(memory_format=job.layout), Loss()
    optimizer = build_optimizer(job, model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(job))
    for _ in range(EPOCHS):
        model.train()
        stats = []
        for images, masks in loader:
            images, masks = images.to(accelerator.device), masks.to(accelerator.device)
            optimizer.zero_grad()
            logits = model(images.contiguous(memory_format=job.layout))
            loss = criterion(logits, masks)
            accelerator.backward(loss)
            optimizer.step()
            if job.loaded:
                stats.append(count_pixels(*accelerator.gather_for_metrics((logits, masks))))
        if job.loaded:
            accelerator.print(micro_iou(stats))


CONTENDERS = {'ours': ours, 'plain': plain, 'lightning': lightning, 'fastai': fastai,
              'monai': monai, 'accelerate': accelerate}
NEEDS = {'lightning': ['lightning'], 'fastai': ['fastai'], 'monai': ['monai', 'ignite'],
         'accelerate': ['accelerate']}
MIXED_ON_CUDA_ONLY = ('fastai', 'monai')        # their autocast is torch.autocast('cuda')
VARIANTS = {'ours': ('equal', 'default', 'auto')}


def list_variants(names):
    """(contender, variant) of everything to be measured."""
    return [(name, variant) for name in names
            for variant in VARIANTS.get(name, ('documented', 'tuned'))]
