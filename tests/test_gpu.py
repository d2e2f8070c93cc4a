"""The step on a GPU, without one: fake CUDA tensors know devices, shapes and dtypes, but hold no numbers.

Whatever mixes devices raises, and so does whatever waits for a number (.item(), if, float()).
Run: python -m pytest tests/test_gpu.py
"""
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import train_unet as tu

pytestmark = pytest.mark.skipif([int(part) for part in torch.__version__.split('.')[:2]] < [2, 14],
                                reason='fake CUDA tensors without a driver crash older versions (seen with 2.6)')
GPU = torch.device('cuda:0')
TINY = {**tu.CONFIG, 'encoder': 'tu-test_five_convs', 'decoder_channels': [16, 12, 8, 8, 8], 'num_classes': 3,
        'image_size': [64, 64], 'image_dtype': 'uint8', 'mean': [120.0] * 3, 'std': [60.0] * 3,
        'learning_rate': 1e-3, 'ema_decay': 0.99, 'class_weights': None}
WEIGHED = {'class_weights': [1.0, 2.0, 3.0]}
CASES = [('float32', WEIGHED), ('float16', {'num_classes': 2}), ('bfloat16', WEIGHED), ('bfloat16', {}),
         ('bfloat16', {'loss': 'focal+dice', 'size_policy': 'crop'}), ('bfloat16', {'activation_checkpointing': True}),
         ('bfloat16', {'architecture': 'Segformer'}), ('bfloat16', {'ema_decay': None, 'grad_clip': None})]


def moved(model):
    """The model on the GPU: fake parameters cannot be exchanged in place, as .to() does."""
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                fake = torch.empty(value.shape, dtype=value.dtype, device=GPU)
                module._parameters[name] = nn.Parameter(fake, requires_grad=value.requires_grad)
        for name, value in list(module._buffers.items()):
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=GPU)
    return model


class Heard(list):
    """A list that also takes the model whose gradients backward makes."""


@pytest.fixture
def waits(monkeypatch):
    """A fake GPU -> the list of what waited for it."""
    heard = Heard()

    def backward(loss):
        """Gradients by hand: the real engine asks the driver for its streams."""
        assert loss.device == GPU and loss.dtype == torch.float32
        for parameter in backward.model.parameters():
            parameter.grad = torch.empty_like(parameter)

    def watched(name, real, answer):
        """A method that waits where the tensor is on the GPU."""
        def method(tensor, *rest, **named):
            if tensor.device != GPU:
                return real(tensor, *rest, **named)
            heard.append(name)
            return answer
        monkeypatch.setattr(torch.Tensor, name, method)

    def to(tensor, *rest, of=torch.Tensor.to, **named):
        made = of(tensor, *rest, **named)
        if tensor.device == GPU != made.device:
            heard.append('to')
        return made

    monkeypatch.setattr(torch.Tensor, 'to', to)
    for name, answer in (('item', False), ('tolist', []), ('cpu', None), ('numpy', None)):
        watched(name, getattr(torch.Tensor, name), answer)
    monkeypatch.setattr(torch.Tensor, 'backward', backward)
    monkeypatch.setattr(torch.cuda, 'get_rng_state', lambda *_: None)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *_: True)        # or autocast switches itself off
    monkeypatch.setattr(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: False)
    heard.use = lambda model: setattr(backward, 'model', model)
    return heard


@pytest.mark.parametrize('dtype, changes', CASES, ids=str)
def test_a_step_on_a_gpu_mixes_no_devices_and_waits_for_nothing(dtype, changes, waits):
    config = {**TINY, **changes}
    with FakeTensorMode():
        model = moved(tu.build_model(config))
        average = tu.Parts(model).copy() if config['ema_decay'] else None
        state = tu.TrainState(model, tu.build_optimizer(model, config, GPU),
                              tu.build_scaler(dtype, config, GPU), average, dtype, batch_size=4)
        waits.use(model)
        loss_fn = tu.SegmentationLoss(config, tu.build_class_weights(config, None))
        loss_fn.reach = 16                                             # measured once, from numbers
        batch = {'image': torch.zeros(4, 3, 64, 64, dtype=torch.uint8),
                 'mask': torch.zeros(4, 64, 64, dtype=torch.uint8), 'index': torch.arange(4)}
        for step in range(2):
            result = tu.guarded_step(state, [batch] * (2 - step), loss_fn, config)
            assert waits == ['item'], step           # once, before the optimizer has any state
            assert {t.device for t in (result.loss, result.norm, result.counts, result.bad)} == {GPU}
        assert {value.device for value in [*state.totals.values(), *state.bad.values()]} == {GPU}
        count, side = (4, 64) if config['size_policy'] == 'resize' else (1, 160)
        batch = {'image': torch.zeros(count, 3, side, side, dtype=torch.uint8),
                 'mask': torch.zeros(count, side, side, dtype=torch.uint8),
                 'full_mask': [torch.zeros(90, 110, dtype=torch.uint8)] * count}
        if count == 1:
            batch['full_mask'] = [torch.zeros(side, side, dtype=torch.uint8)]
        with torch.no_grad(), state.evaluated() as model:
            losses, counts = tu.run_loss(loss_fn, model.eval(), dtype, batch)
        assert losses.device == counts.device == GPU and waits == ['item']


def test_norms_that_hold_their_activation_keep_it_when_processes_share_their_statistics(monkeypatch):
    config = {**TINY, 'encoder': 'tu-test_efficientnet', 'batch_size': 4, 'ema_decay': None}
    monkeypatch.setattr(tu, 'world', lambda: tu.World(0, 2))
    monkeypatch.setattr(tu, 'has_idle_parameters', lambda model: False)
    monkeypatch.setattr(nn.parallel, 'DistributedDataParallel', lambda model, *_, **__: model)
    monkeypatch.setattr(nn.Module, 'to', lambda model, *_, **__: moved(model))
    with FakeTensorMode():
        plain = tu.build_model(config)
        state = tu.build_state(tu.build_model(config), config, tu.Precision('float32', None, ''), GPU)
    acts = {name: type(module.act) for name, module in plain.named_modules()
            if type(module).__name__ == 'BatchNormAct2d'}
    norms = [module for module in state.model.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert acts and len(norms) > len(acts)
    assert acts == {name: type(module.act) for name, module in state.model.named_modules() if name in acts}


def test_a_run_of_a_mac_goes_on_with_its_step_beside_the_weights(waits):
    with FakeTensorMode():
        model = moved(tu.build_model(TINY))
        optimizer = tu.build_optimizer(model, TINY, GPU)
        state = tu.TrainState(model, optimizer, torch.amp.GradScaler('cpu', enabled=False))
        for parameter in model.parameters():
            optimizer.state[parameter] = {'step': torch.zeros(()), 'exp_avg': torch.zeros_like(parameter)}
        saved = tu.state_dict(state, state.weights())
        for group in saved['optimizer']['param_groups']:
            group['fused'] = None
        tu.restore(state, saved)
        assert {kept['step'].device for kept in optimizer.state.values()} == {GPU}


def test_adagrad_is_fused_on_a_cpu_alone():
    build = lambda kind: tu.build_optimizer(nn.Linear(2, 2), {**TINY, 'optimizer': 'Adagrad'}, torch.device(kind))
    assert build('cpu').defaults['fused'] and not build('cuda').defaults['fused']      # torch 2.6 refuses it there
