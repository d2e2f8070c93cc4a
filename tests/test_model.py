"""Model and loss: the network, its variants that save time or memory, one loss per image, and the way to a mask.

Run: python -m pytest tests/test_model.py
"""
import copy
import itertools
import math
import pickle
import socket
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import train_unet as tu
from conftest import FORKS, TINY
from helpers import IGNORED

pytestmark = pytest.mark.usefixtures('one_thread')

BASE = {**tu.CONFIG, 'encoder': 'tu-test_resnet', 'decoder_channels': [16, 12, 8, 8, 8],
        'num_classes': 2, 'mean': [0.0], 'std': [1.0], 'image_dtype': 'uint8',
        'image_size': [32, 32]}


def build(**changes):
    config = {**BASE, **changes}
    if problems := tu.validate_config(config):
        raise tu.ConfigError(problems)
    return tu.build_model(config)


def pictures(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def loss_of(**changes):
    return tu.SegmentationLoss({**BASE, **changes}, changes.get('class_weights'))


def dtypes_of_outputs(module, kind):
    """A list that collects the dtype of every output of the submodules of a kind."""
    seen = []
    for part in module.modules():
        if isinstance(part, kind):
            part.register_forward_hook(lambda m, inputs, output: seen.append(output.dtype))
    return seen


# --- the network ----------------------------------------------------------------------


ARCHITECTURES = ['Unet', 'UnetPlusPlus', 'MAnet', 'Linknet', 'FPN', 'PSPNet', 'DeepLabV3', 'DeepLabV3Plus', 'UPerNet',
                 'Segformer']


@pytest.mark.parametrize('architecture, in_channels', [*((name, 5) for name in ARCHITECTURES),
                                                       ('Unet', 1), ('Unet', 3)])
def test_any_architecture_takes_uint8_of_odd_size(architecture, in_channels):
    model = build(architecture=architecture, in_channels=in_channels, num_classes=4).eval()
    logits = model(pictures(2, in_channels, 33, 47))
    assert logits.shape == (2, 4, 33, 47)
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize('architecture, encoder', [('Segformer', 'mit_b0'), ('unet', 'resnet18'),
                                                   ('DeepLabV3Plus', 'resnet18')])
def test_encoders_of_smp_and_names_in_lower_case(architecture, encoder):
    model = build(architecture=architecture, encoder=encoder).eval()
    assert model(pictures(1, 3, 40, 32)).shape == (1, 1, 40, 32)


@pytest.mark.parametrize('num_classes, outputs', [(2, 1), (3, 3)])
def test_two_classes_have_one_output(num_classes, outputs):
    assert build(num_classes=num_classes).eval()(pictures(1, 3, 32, 32)).shape[1] == outputs


def test_the_network_sees_normalised_channels_padded_with_the_mean():
    model = build(mean=[1.0, 2.0, 3.0], std=[2.0, 4.0, 5.0]).eval()
    seen = []
    model.network.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]))
    images = pictures(1, 3, 33, 20)
    model(images)
    mean, std = torch.tensor([[1, 2, 3], [2, 4, 5]]).view(2, 3, 1, 1)
    by_hand = (images.double() - mean) / std
    assert seen[0].shape == (1, 3, 64, 32)
    assert torch.allclose(seen[0][..., :33, :20].double(), by_hand)
    assert seen[0][..., 33:, :].abs().max() == 0 and seen[0][..., 20:].abs().max() == 0


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'int16', 'int32'])
def test_a_network_of_deep_images_scales_a_tensor_as_it_scales_an_array(dtype):
    """Signed numbers (a CT in Hounsfield units) stay as stored: they had been divided by the largest of their type."""
    config = {**BASE, 'in_channels': 1, 'image_dtype': 'float32'}
    model = tu.SegmentationModel(nn.Identity(), tu.CONFIG | config)
    array = (torch.arange(64 * 64).reshape(64, 64) % 256).to(getattr(torch, dtype))
    wanted = torch.from_numpy(tu.convert_pixels(array.numpy(), 'x', model.config)[..., 0])
    torch.testing.assert_close(model(array[None, None])[0, 0], wanted)


def test_padding_is_taken_off_where_it_was_put_on():
    model, images = build().eval(), pictures(2, 3, 33, 47)
    whole = model(F.pad(images, (0, 17, 0, 31)))
    assert torch.equal(model(images), whole[..., :33, :47])


def test_a_compiled_network_is_not_the_one_made_for_export(monkeypatch):
    """On torch 2.7 to 2.13 torch.compiler.is_exporting() is true inside torch.compile too."""
    monkeypatch.setattr(torch.compiler, 'is_exporting', lambda: True, raising=False)
    monkeypatch.setattr(tu, 'pad_by_index', None)
    config = {**tu.CONFIG, 'num_classes': 2, 'mean': [0.0], 'std': [1.0], 'encoder': 'tu-test_resnet',
              'decoder_channels': [8] * 5, 'image_size': [40, 40]}
    model = tu.build_model(config).eval()
    assert model(torch.zeros(1, 3, 40, 40)).shape == (1, 1, 40, 40)


@pytest.mark.parametrize('changes, told', [
    ({'architecture': 'Unett'}, "did you mean 'Unet'"),
    ({'architecture': 'deeplabv3+'}, "did you mean 'DeepLabV3"),
    ({'architecture': 'Unett', 'optimizer': 5, 'size_policy': 'stretch'}, 'the config cannot be used'),
    ({'encoder': 'resnett18'}, "encoder='resnett18'"),                 # resolve_config says what is meant
    ({'encoder': 'tu-nonsense'}, 'nonsense'),
    ({'keep_float32': 'segmentation_haed'}, "did you mean 'segmentation_head'"),
    ({'keep_float32': 'True'}, 'at the top it has encoder, decoder, segmentation_head; for all type use_amp=False'),
    ({'architecture': 'Linknet', 'encoder': 'mit_b0'}, 'mit_b0'),
    ({'encoder': 'resnet18', 'encoder_weights': 'imagnet'}, "encoder_weights='imagnet'"),
])
def test_a_network_that_does_not_exist_is_a_config_error_that_helps(changes, told):
    with pytest.raises(tu.ConfigError) as error:
        build(**changes)
    assert told in str(error.value)


@pytest.mark.parametrize('architecture, encoder, size', [
    ('PAN', 'resnet18', '64x64'), ('DPT', 'tu-vit_tiny_patch16_224', '224')])
def test_a_network_that_cannot_take_the_size_is_a_config_error(small_set, architecture, encoder, size):
    with pytest.raises(tu.ConfigError, match=rf'cannot take .*\(1, 3, 32, 32\) .*, such as {size}$'):
        tu.train(**TINY | {'architecture': architecture, 'encoder': encoder}, data=str(small_set))


@pytest.mark.parametrize('architecture, encoder, side', [
    ('PAN', 'tu-test_resnet', 128), ('DPT', 'tu-vit_tiny_patch16_224', 224), ('Unet', 'tu-test_resnet', None)])
def test_images_smaller_than_a_network_takes_are_padded(architecture, encoder, side):
    """Beside larger ones, of which crops are made. Nothing changes for networks that take them as they are."""
    model = build(architecture=architecture, encoder=encoder, size_policy='crop', image_size=[224, 224])
    assert model.training and not any(value for name, value in model.named_buffers() if 'num_batches' in name)
    images = pictures(1, 3, 20, 100)                                   # mean 0: the padding is 0 before and after
    padded = torch.nn.functional.pad(images, (0, (side or 128) - 100, 0, (side or 32) - 20))
    assert torch.equal(model.eval()(images), model(padded)[..., :20, :100])
    # crops that small are not padded but refused, see try_size
    assert build(architecture=architecture, encoder=encoder, size_policy='crop', image_size=[64, 96]).least == \
        ([64, 96] if side else None)


def test_images_smaller_than_the_one_size_that_a_network_takes_are_padded(monkeypatch):
    class Fixed(nn.Conv2d):
        def forward(self, images):
            assert images.shape[-2:] == (64, 96), 'another size'
            return super().forward(images)

    monkeypatch.setattr(tu, 'build_network', lambda config: Fixed(config['in_channels'], 1, 1))
    model = build(size_policy='pad', image_size=[64, 96], in_channels=5)
    assert model(pictures(2, 5, 40, 90)).shape == (2, 1, 40, 90)


def test_a_width_that_the_network_does_not_have_is_told_and_not_claimed(small_set, caplog):
    caplog.set_level('INFO')
    settings = {**TINY, 'architecture': 'FPN', 'num_epochs': 1, 'image_size': 64, 'data': str(small_set)}
    tu.train(**settings)
    assert 'decoder_channels: no effect, only Unet, UnetPlusPlus, MAnet have them' in caplog.text
    caplog.clear()
    result = tu.train(**{key: value for key, value in settings.items() if key != 'decoder_channels'})
    assert 'decoder_channels' not in caplog.text
    assert tu.load(result.run_dir).config['architecture'] == 'FPN'


# --- weights from elsewhere -----------------------------------------------------------


def test_weights_of_timm_are_asked_for_in_its_own_way(recwarn):
    with pytest.raises(tu.ConfigError, match='encoder_weights=None starts from scratch'):
        build(encoder='tu-resnet10t', encoder_weights='imagenet')      # there is no network in here
    assert not [warning for warning in recwarn if 'encoder_weights' in str(warning.message)]


def test_damaged_weights_of_timm_are_told_and_those_of_its_classifier_are_not(monkeypatch, tmp_path, caplog):
    import timm
    from safetensors.torch import load_file, save_file
    path, name = tmp_path / 'model.safetensors', 'test_efficientnet'
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', lambda *_, **__: load_file(path))
    save_file(timm.create_model(name).state_dict(), path)
    build(encoder=f'tu-{name}', encoder_weights='imagenet')
    assert 'keys' not in caplog.text
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(tu.ConfigError, match='out of reach or damaged'):
        build(encoder=f'tu-{name}', encoder_weights='imagenet')


@pytest.mark.parametrize('reachable', [True, False])
@pytest.mark.parametrize('endpoint, address', [
    ('https://huggingface.co', ('huggingface.co', 443)), ('http://mirror:8081', ('mirror', 8081)),
    ('http://mirror/hub', ('mirror', 80))])
def test_the_hub_is_asked_once_whether_it_is_there(monkeypatch, reachable, endpoint, address):
    """Its client would try again and again for half a minute; in its offline mode the cache still works."""
    from huggingface_hub import constants

    def connect(address, timeout):
        asked.append((address, timeout))
        if not reachable:
            raise OSError('no network')
        return SimpleNamespace(close=lambda: None)

    asked = []
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'ENDPOINT', endpoint)
    monkeypatch.setattr(tu.socket, 'create_connection', connect)
    for name in ('HTTPS_PROXY', 'https_proxy', 'HTTP_PROXY', 'http_proxy', 'ALL_PROXY', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)
    with tu.asking_hub():
        assert constants.HF_HUB_OFFLINE is not reachable and asked == [(address, 3)]
    assert not constants.HF_HUB_OFFLINE                                # a notebook may ask again with a network
    monkeypatch.setenv('ALL_PROXY', 'http://proxy:3128')
    with tu.asking_hub():
        assert not constants.HF_HUB_OFFLINE and len(asked) == 1        # it is reached by the proxy


def test_a_proxy_that_refuses_is_told_in_a_line(monkeypatch):
    """httpx's errors are none of Python's own."""
    from huggingface_hub import constants

    def refuse():
        while True:
            client, _ = proxy.accept()
            client.recv(65536)
            client.sendall(b'HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n')
            client.close()

    proxy = socket.create_server(('127.0.0.1', 0))
    threading.Thread(target=refuse, daemon=True).start()
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setenv('HTTPS_PROXY', f'http://127.0.0.1:{proxy.getsockname()[1]}')
    with pytest.raises(tu.ConfigError, match='encoder_weights=None starts from scratch'):
        build(encoder='resnet18', encoder_weights='ssl')
    assert tu.encoder_statistics({'encoder': 'resnet18', 'encoder_weights': 'ssl', 'in_channels': 3})[0][0] == 123.675


def test_a_mistake_within_is_not_taken_for_the_hubs():
    with pytest.raises(ZeroDivisionError), tu.asking_hub():
        1 / 0


def test_a_package_that_a_proxy_needs_is_told_in_a_line(monkeypatch):
    """httpx wants socksio for a SOCKS proxy."""
    def lack(*args, **settings):
        raise ImportError("the 'socksio' package is not installed")

    monkeypatch.setattr('segmentation_models_pytorch.Unet', lack)
    monkeypatch.setattr('segmentation_models_pytorch.encoders.get_preprocessing_params', lack)
    with pytest.raises(tu.ConfigError, match='socksio.*encoder_weights=None starts from scratch'):
        build(encoder_weights='imagenet')
    assert tu.encoder_statistics({'encoder': 'resnet18', 'encoder_weights': 'ssl', 'in_channels': 3})[0][0] == 123.675


def test_an_encoder_that_cannot_be_dilated_is_named():
    """timm asserts it."""
    with pytest.raises(tu.ConfigError, match="architecture='DeepLabV3Plus' with encoder='tu-hrnet_w18_small'"):
        build(architecture='DeepLabV3Plus', encoder='tu-hrnet_w18_small')


def test_the_hub_is_asked_for_weights_alone_and_not_in_vain(monkeypatch):
    from huggingface_hub import constants

    def connect(*_, **__):
        asked.append(sys._getframe(1).f_code.co_name)
        raise OSError('no network')

    asked, of = [], {'encoder': 'resnet18', 'encoder_weights': 'ssl', 'in_channels': 3}
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(tu.socket, 'create_connection', connect)
    monkeypatch.setattr(tu.urllib.request, 'getproxies', dict)
    build()
    assert not asked
    with pytest.raises(tu.ConfigError, match='out of reach'):
        build(**of)
    tu.encoder_statistics(of)
    assert asked.count('asking_hub') == 2                              # smp 0.5 has an address of its own too
    monkeypatch.setattr(tu.urllib.request, 'getproxies', lambda: {'https': 'http://proxy:3128'})
    with tu.asking_hub():
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(tu.urllib.request, 'getproxies', dict)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    with tu.asking_hub():
        assert asked.count('asking_hub') == 2
    monkeypatch.setattr('segmentation_models_pytorch.encoders.get_preprocessing_params',
                        lambda *what: {'mean': [1, 1, 1], 'std': [1, 1, int(what == ('resnet18', 'ssl'))]})
    assert tu.encoder_statistics(of) == [[255] * 3, [255] * 3]


def test_an_encoder_without_weights_ends_not_where_its_statistics_are_sought():
    config = {'encoder': 'tu-botnet50ts_256', 'encoder_weights': 'imagenet', 'in_channels': 3}
    assert tu.encoder_statistics(config)[0] == pytest.approx([123.675, 116.28, 103.53])      # what follows tells


# --- folded upsampling ----------------------------------------------------------------


def step_of(model, images, dtype='float32'):
    """Logits of a training step, its FLOPs, and all gradients as one tensor."""
    tu.seed_everything(0)                                              # some encoders drop paths
    with FlopCounterMode(display=False) as flops:
        logits = tu.UnderAutocast(model, dtype)(images)
        logits.square().mean().backward()
    return logits.detach(), flops.get_total_flops(), tu.flat(p.grad for p in model.parameters())


def folded_and_not(**changes):
    folded = build(image_size=[64, 64], **changes)
    plain = copy.deepcopy(folded)
    tu.fold_upsampling(plain, False)
    return folded, plain


@pytest.mark.parametrize('changes', [{}, {'in_channels': 1, 'num_classes': 4}, {'encoder': 'mit_b0'},
                                     {'activation_checkpointing': True}], ids=str)
def test_folded_upsampling_is_the_same_function_for_fewer_operations(changes):
    folded, plain = folded_and_not(**changes)
    assert folded.state_dict().keys() == plain.state_dict().keys() == set(
        tu.SegmentationModel(tu.build_network(folded.config), folded.config).state_dict())
    images = pictures(4, folded.config['in_channels'], 60, 50)
    (logits, fewer, gradient), (wanted, flops, truth) = step_of(folded, images), step_of(plain, images)
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (gradient - truth).norm() < 3e-3 * truth.norm()             # statistics of norms amplify the rounding
    assert fewer < flops


def test_folded_upsampling_under_autocast_and_out_of_it():
    folded, plain = folded_and_not()
    kept = build(keep_float32='decoder.blocks.4.conv1.0', image_size=[64, 64])
    kept.load_state_dict(folded.state_dict())
    images = pictures(4, 3, 64, 64)
    wanted = step_of(plain, images)[0]
    for model, dtypes in ((folded, {torch.bfloat16}), (kept, {torch.float32})):
        seen = dtypes_of_outputs(model.network.decoder.blocks[4].conv1, nn.Conv2d)
        logits, *_ = step_of(model, images, 'bfloat16')
        assert set(seen) == dtypes
        assert (logits - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize('edited', [{'decoder_attention_type': 'scse'}, {'decoder_interpolation': 'bilinear'}], ids=str)
def test_blocks_with_more_before_their_first_convolution_are_not_folded(edited):
    """build_network may be edited to have an attention there, or pixels that are not repeated."""
    network = smp.Unet('tu-test_resnet', encoder_weights=None, decoder_channels=[32, 32, 32, 16, 16], **edited).eval()
    images = torch.rand(2, 3, 64, 64)
    wanted = network(images)
    tu.fold_upsampling(network)
    assert torch.equal(network(images), wanted)


@pytest.mark.parametrize('how', [{'dilation': 2, 'padding': 2}, {'padding': 1, 'padding_mode': 'reflect'},
                                 {'padding': 1, 'groups': 8}], ids=str)
def test_blocks_whose_first_convolution_is_another_are_not_folded(how):
    """Of dilation 2 they were another function than on a GPU in float32, or when exported."""
    network = smp.Unet('tu-test_resnet', encoder_weights=None, decoder_channels=[32, 32, 32, 16, 16]).eval()
    for block in network.decoder.blocks:
        conv = block.conv1[0]
        block.conv1[0] = nn.Conv2d(conv.in_channels, conv.out_channels, 3, bias=False, **how)
    images = torch.rand(2, 3, 64, 64)
    wanted = network(images)
    tu.fold_upsampling(network)
    assert torch.equal(network(images), wanted)


def test_a_block_with_a_forward_of_its_own_is_not_folded():
    """That of Folded would stand in its place, without a word."""
    class Shifted(smp.decoders.unet.decoder.UnetDecoderBlock):
        def forward(self, *maps, **named):
            return super().forward(*maps, **named) + 1

    network, images = smp.Unet('tu-test_resnet', encoder_weights=None).eval(), torch.rand(2, 3, 64, 64)
    for block in network.decoder.blocks:
        block.__class__ = Shifted
    wanted = network(images)
    tu.fold_upsampling(network)
    assert torch.equal(network(images), wanted)


def test_a_block_that_has_but_the_name_of_smps_is_left_alone():
    class UnetDecoderBlock(nn.Sequential):
        """Of a network of one's own, put into build_network."""

    network = nn.Sequential(UnetDecoderBlock(nn.Conv2d(3, 1, 1)))
    tu.fold_upsampling(network)                                        # AttributeError
    assert type(network[0]) is UnetDecoderBlock


def test_a_folded_network_tells_its_shapes_on_the_meta_device():
    """Summaries and counters of operations run it there; autocast does not know it."""
    network = build(image_size=[64, 64]).to('meta')
    assert network(torch.zeros(1, 3, 64, 64, dtype=torch.uint8, device='meta')).shape == (1, 1, 64, 64)


def test_where_folding_pays():
    pays = [(device, is_autocast) for device in ('cpu', 'cuda', 'mps') for is_autocast in (False, True)
            if tu.folding_pays(device, is_autocast)]
    assert pays == [('cpu', False), ('cpu', True), ('cuda', True)]


def test_an_export_and_an_estimate_for_float32_on_a_gpu_see_the_plain_network(monkeypatch):
    folded, _ = folded_and_not()
    model = copy.deepcopy(folded)
    tu.trace_example(model, True)
    folds = lambda model: {part.folds for part in model.modules() if isinstance(part, tu.Folded)}
    assert (folds(model), folds(folded)) == ({False}, {True})
    config = {**folded.config, 'batch_size': 2}
    here, half = [tu.estimate_memory(config, dtype)['activations'] for dtype in ('float32', 'bfloat16')]
    monkeypatch.setattr(tu, 'choose_device', lambda wish: torch.device('cuda'))
    assert tu.estimate_memory(config, 'float32')['activations'] > 1.01 * here
    assert tu.estimate_memory(config, 'bfloat16')['activations'] == half         # where a GPU folds too


# --- layouts and pooling of Apple GPUs ------------------------------------------------


class LikeApple:
    """An image that says it is on an Apple GPU, and computes on the CPU."""

    @staticmethod
    def of(tensor):
        class Apple(torch.Tensor):
            device = torch.device('mps')
        return tensor.as_subclass(Apple)


def test_channels_last_is_left_on_apple_gpus(tmp_path):
    """There BatchNorm's gradients were wrong by orders of magnitude (pytorch issue 175189): neither weights nor
    images may be in that layout, whoever makes the batch."""
    seen = []
    network = torch.nn.Conv2d(3, 1, 3, padding=1)
    config = {**tu.CONFIG, 'mean': [0.0], 'std': [1.0], 'num_classes': 2, 'image_size': [32, 32]}
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_contiguous()))
    model = tu.SegmentationModel(network, config)
    batch = torch.zeros(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model(batch)
    model(LikeApple.of(batch))
    assert seen == [False, True]
    layouts = {kind: tu.laid_out(model, config, torch.device(kind)).network.weight.is_contiguous()
               for kind in ('mps', 'cpu')}
    assert layouts == {'mps': True, 'cpu': False}


@pytest.mark.parametrize('network', [{'architecture': 'Segformer'}, {'encoder': 'tu-convnext_atto'},
                                     {'architecture': 'PSPNet'}, {'architecture': 'UPerNet'}], ids=str)
def test_norms_and_pooling_take_rows_on_apple_gpus(network):
    """Some encoders and decoders come to channels_last by themselves; pooling into 3 or 6 of 16 is not to be had there.
    The network is the same function."""
    settings = {**tu.CONFIG, 'encoder': 'resnet18', 'decoder_channels': [16, 12, 8, 8, 8], 'mean': [0.0], 'std': [1.0],
                'num_classes': 2, 'image_size': [64, 64], **network}
    model, images = tu.build_model(settings).eval(), torch.randn(2, 3, 128, 128)
    usual, pools, norms = model(images), [], []
    tu.laid_out(model, settings, torch.device('mps'))
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.register_forward_hook(lambda module, inputs, made: norms.append(made.is_contiguous()))
    real = torch.nn.functional.adaptive_avg_pool2d
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, 'adaptive_avg_pool2d', lambda x, size: pools.append(size) or real(x, size))
        assert torch.allclose(model(images), usual, rtol=1e-4, atol=1e-5)
    assert norms and all(norms) and not pools


@pytest.mark.parametrize('capability, widths', [('AVX512', {16, 32, 64}), ('AVX2', {8, 16, 24, 32, 64})])
def test_norms_of_few_channels_take_rows_on_a_cpu(capability, widths, monkeypatch):
    """In channels_last they work on whole registers of channels, 16 in AVX512; one that is half empty is slow."""
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    settings = {**tu.CONFIG, 'encoder': 'tu-resnet10t', 'decoder_channels': [64, 32, 16, 12, 8], 'mean': [0.0],
                'std': [1.0], 'num_classes': 2, 'image_size': [64, 64], 'channels_last': True}
    model, images, seen = tu.build_model(settings).eval(), torch.randn(2, 3, 64, 64), {}
    usual = model(images)
    tu.laid_out(model, settings, torch.device('cpu'))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda module, inputs, _: seen.update(
                {module.num_features: inputs[0].is_contiguous(memory_format=torch.channels_last)}))
    assert torch.allclose(model(images), usual, rtol=1e-4, atol=1e-5)
    assert {width for width, is_last in seen.items() if is_last and width < 128} == widths
    assert seen[12] is False
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    tu.laid_out(model, settings, torch.device('cpu'))                  # a notebook gives the same network again
    assert 1 in hooks and hooks == [len(module._forward_pre_hooks) for module in model.modules()]


def test_a_network_with_a_convolution_in_three_dimensions_lies_in_channels_last():
    """Attention over channels and places (HAN's CSAM) has one inside; torch refuses this layout for its weights."""
    model = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv3d(1, 1, 3)])
    tu.laid_out(model, {'channels_last': True}, torch.device('cpu'))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous()


def learn_from_every_other_pixel():
    """What a forked process does: gradients of a layer with which mobileone and RepVGG begin, in channels_last."""
    torch.set_num_threads(1)
    plain = nn.Sequential(nn.Conv2d(3, 48, 1, 2, bias=False))
    network = tu.laid_out(copy.deepcopy(plain), {'channels_last': True}, torch.device('cpu'))
    for _ in range(40):
        images = torch.randn(4, 3, 96, 96)
        for each, layout in ((plain, torch.contiguous_format), (network, torch.channels_last)):
            each.zero_grad()
            each(images.contiguous(memory_format=layout).requires_grad_()).square().sum().backward()
            others = [torch.randn(size) for size in (10, 100, 1000, 5000)]             # what a fault would run into
        assert len(others) == 4
        for usual, ours in zip(plain.parameters(), network.parameters(), strict=True):
            assert torch.allclose(usual.grad, ours.grad, rtol=1e-3, atol=1e-2 * usual.grad.abs().max().item())


@pytest.mark.parametrize('layer, is_ours', [
    (nn.Conv2d(6, 6, 1, 2, groups=3), True), (nn.Conv2d(3, 6, 1, (1, 3), padding='valid'), True),
    (nn.Conv2d(16, 6, 1, 2), False), (nn.Conv2d(3, 6, 1, 2, padding=1), False), (nn.Conv2d(3, 6, (1, 2), 2), False)])
@pytest.mark.parametrize('in_float32', [False, True])
def test_strides_of_single_pixels_give_what_they_gave(layer, is_ours, in_float32):
    images, layer = torch.randn(2, layer.in_channels, 9, 10), copy.deepcopy(layer)
    usual, network = layer(images), nn.Sequential(layer)
    tu.keep_float32(network, '0' if in_float32 else None)
    tu.laid_out(network, {'channels_last': True}, torch.device('cpu'))
    assert isinstance(layer, tu.ConvolvesEveryNth) == is_ours
    assert torch.allclose(layer(images), usual, atol=1e-6)
    with torch.autocast('cpu', torch.bfloat16):
        assert layer(images).dtype == (torch.float32 if in_float32 else torch.bfloat16)


@pytest.mark.skipif(sys.platform != 'linux', reason='forks processes that are ready to train')
def test_strides_of_single_pixels_do_not_corrupt_memory(forks):
    """torch 2.6 to 2.15 wrote beyond the memory of such gradients: the process died."""
    process = FORKS.Process(target=learn_from_every_other_pixel)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize('changes', [{}, {'keep_float32': 'decoder.blocks.4'}, {'activation_checkpointing': True}])
def test_a_model_pickles_with_all_that_was_changed_in_it(changes):
    """torch.save(result.model, ...) is how many keep a network."""
    settings = tu.CONFIG | {'encoder': 'tu-resnet10t', 'decoder_channels': [64, 32, 16, 12, 8], 'mean': [0.0],
                            'std': [1.0], 'num_classes': 2, 'image_size': [64, 64], 'channels_last': True} | changes
    model = tu.laid_out(tu.build_model(settings), settings, torch.device('cpu')).eval()
    twin, images = pickle.loads(pickle.dumps(model)), torch.randn(2, 3, 64, 64)
    assert torch.equal(twin(images), model(images))
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]


def test_a_network_of_ones_own_gets_the_layout_that_apple_gpus_can_train(monkeypatch):
    seen, model = [], torch.nn.Conv2d(3, 1, 3)
    monkeypatch.setattr(model, 'to', lambda device: model)             # there is none here
    monkeypatch.setattr(tu, 'laid_out', lambda model, config, device: seen.append(device.type) or model)
    config = {**tu.CONFIG, 'learning_rate': 1e-3, 'ema_decay': None}
    tu.build_state(model, config, tu.Precision('float32', None, ''), torch.device('mps'))
    assert seen == ['mps']


# --- keep_float32 ---------------------------------------------------------------------


@pytest.mark.parametrize('name', ['segmentation_head', 'encoder', 'decoder'])
@pytest.mark.parametrize('copied', [False, True], ids=['itself', 'its copy'])
def test_keep_float32_keeps_one_module_out_of_autocast(name, copied):
    model = build(keep_float32=name)
    model = (copy.deepcopy(model) if copied else model).eval()
    kept = model.network.get_submodule(name)
    others = nn.ModuleList(child for child in model.network.children() if child is not kept)
    inside, outside = dtypes_of_outputs(kept, nn.Conv2d), dtypes_of_outputs(others, nn.Conv2d)
    tu.UnderAutocast(model, 'bfloat16')(pictures(2, 3, 32, 32))
    assert set(inside) == {torch.float32}
    assert set(outside) == {torch.bfloat16}


@pytest.mark.parametrize('name', ['decoder.blocks', 'encoder.layer1'])
def test_keep_float32_reaches_lists_of_modules(name):
    model = build(encoder='resnet18', keep_float32=name).eval()
    inside = dtypes_of_outputs(model.network.get_submodule(name), nn.Conv2d)
    tu.UnderAutocast(model, 'bfloat16')(pictures(2, 3, 32, 32))
    assert set(inside) == {torch.float32}


def test_keep_float32_changes_no_key_and_no_number_in_float32():
    plain, kept = build(), build(keep_float32='segmentation_head')
    kept.load_state_dict(plain.state_dict())
    images = pictures(2, 3, 32, 32)
    assert torch.equal(plain.eval()(images), kept.eval()(images))


def test_a_network_kept_in_float32_can_be_given_again_and_take_numbers_first():
    class Scaled(nn.Conv2d):
        def forward(self, factor, images):
            return factor * super().forward(images)

    net = nn.Sequential(nn.Conv2d(3, 3, 1))
    for _ in range(2):
        tu.keep_float32(net, '0')
    net.scaled = Scaled(3, 1, 1)
    tu.keep_float32(net, 'scaled')
    with torch.autocast('cpu', torch.bfloat16):
        assert net.scaled(2, net[0](torch.ones(1, 3, 4, 4))).dtype == torch.float32


# --- activation_checkpointing ---------------------------------------------------------


NETWORKS = [{'encoder': 'resnet18'}, {'encoder': 'tu-resnet10t'},
            {'encoder': 'tu-test_resnet', 'architecture': 'UnetPlusPlus', 'decoder_channels': [16, 12, 8, 8, 8]},
            {'encoder': 'tu-test_resnet', 'architecture': 'FPN'},
            {'encoder': 'tu-test_resnet', 'architecture': 'DeepLabV3Plus'},
            {'encoder': 'mit_b0', 'architecture': 'Segformer'}, {'encoder': 'mobilenet_v2'},
            {'encoder': 'efficientnet-b0'}, {'encoder': 'tu-test_resnet'},
            {'encoder': 'tu-test_efficientnet'}]
BOTH = {'encoder': 'tu-test_resnet', 'keep_float32': 'segmentation_head'}


@pytest.mark.parametrize('changes', [*NETWORKS, BOTH], ids=str)
def test_activation_checkpointing_recomputes_most_of_the_encoder_and_changes_no_gradient_and_no_statistic(changes):
    plain, saving = build(**changes), build(activation_checkpointing=True, **changes)
    saving.load_state_dict(plain.state_dict())
    images = pictures(2, 3, 32, 32)
    count = dtypes_of_outputs(saving.network.encoder, nn.Conv2d)
    for dtype in ('float32', 'bfloat16') if changes['encoder'].startswith(('tu-', 'mit')) else ('float32',):
        for model in (plain, saving):
            torch.manual_seed(1)                                       # of dropout
            model.zero_grad()
            count.clear()
            loss = tu.UnderAutocast(model.train(), dtype)(images).square().mean()
            forward = len(count)
            loss.backward()
        assert len(count) > 1.7 * forward > 0
        gradients = [{key: p.grad for key, p in m.named_parameters() if p.grad is not None}
                     for m in (plain, saving)]
        assert gradients[0].keys() == gradients[1].keys(), dtype
        assert all(torch.equal(a, b) for a, b in zip(*(g.values() for g in gradients))), dtype
        for (key, a), b in zip(plain.state_dict().items(), saving.state_dict().values()):
            assert torch.equal(a, b), (dtype, key)  # running statistics and their counters among them


class Branches(nn.Module):
    """As in HRNet, the list that it is given ends up with other maps."""
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, maps, *, scale):
        for number, part in enumerate(self.parts):
            maps[number] = part(maps[number]).tanh() * scale
        return [maps[0] + maps[1], maps[0] * maps[1]]


class Dense(nn.Module):
    """As in DenseNet, a list that a layer was given grows before the backward pass."""
    def __init__(self, wraps):
        super().__init__()
        self.layers = nn.ModuleList(wraps(Joined(4 * count)) for count in (1, 2))
        self.branches = wraps(Branches())

    def forward(self, maps):
        found = [maps]
        for layer in self.layers:
            found.append(layer(found))
        return sum(self.branches(maps=found[1:], scale=0.5))


class Joined(nn.Conv2d):
    def __init__(self, width):
        super().__init__(width, 4, 3, padding=1)

    def forward(self, maps):
        return super().forward(torch.cat(maps, 1)).tanh()


def test_activation_checkpointing_that_finds_no_blocks_says_so(caplog):
    own = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    config = build().config
    precision = tu.Precision('float32', None, '')
    for saves in (False, True):
        tu.warn_of_size(tu.build_model({**config, 'activation_checkpointing': saves}, own), precision)
        assert ('activation_checkpointing: no effect' in caplog.text) == saves
    caplog.clear()
    tu.warn_of_size(build(activation_checkpointing=True), precision)
    assert 'no effect' not in caplog.text


def test_activation_checkpointing_of_blocks_that_change_the_lists_that_they_are_given():
    """Gradients of HRNet were others by 94 %, without a word; DenseNet ended in a traceback."""
    plain, saving = Dense(lambda block: block), Dense(lambda block: tu.change_forward(block, tu.Checkpointed))
    saving.load_state_dict(plain.state_dict())
    images = torch.randn(2, 4, 8, 8)
    for model in (plain, saving):
        model(images).square().sum().backward()
    for usual, ours in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(usual.grad, ours.grad) and usual.grad.abs().max() > 0


class Noting(nn.Conv2d):
    """Appends what it finds to the list that it is given."""
    def forward(self, maps, found):
        found.append(super().forward(maps).tanh())
        return found[-1] * 2


def test_activation_checkpointing_repeats_what_an_apple_gpu_drew(monkeypatch):
    """torch puts back the random states of the CPU and of CUDA alone (pull request 194478): the second run dropped
    other values, and gradients were wrong without a word. A generator stands for that of the GPU."""
    class Drops(nn.Sequential):
        def forward(self, maps):
            made = super().forward(maps)
            return made * (torch.rand(made.shape, generator=apple) < 0.5)

    apple, found = torch.Generator(), []
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(torch.mps, 'get_rng_state', apple.get_state)
    monkeypatch.setattr(torch.mps, 'set_rng_state', apple.set_state)
    plain = Drops(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    saving, images = tu.change_forward(copy.deepcopy(plain), tu.Checkpointed), torch.randn(2, 3, 9, 9)
    for block in plain, saving:
        apple.manual_seed(0)
        made = block.train()(images).square().sum()
        torch.rand(3, generator=apple)                                 # of what comes after the block
        made.backward()
        found.append([*(p.grad for p in block.parameters()), apple.get_state()])
    assert all(map(torch.equal, *found))                               # the last: nothing more was drawn


def test_activation_checkpointing_lets_a_block_write_into_the_list_of_its_caller():
    plain, saving = Noting(4, 4, 3), tu.change_forward(Noting(4, 4, 3), tu.Checkpointed)
    saving.load_state_dict(plain.state_dict())
    images, losses = torch.randn(2, 4, 8, 8), []
    for block in (plain, saving):
        found = []
        losses.append((block(images, found).square() + sum(found)).sum())
        losses[-1].backward()
        assert len(found) == 1
    assert losses[0] == losses[1] and torch.equal(plain.weight.grad, saving.weight.grad)


def test_activation_checkpointing_lets_a_loss_ask_for_gradients_twice():
    """As penalties of gradients do, and losses that weigh each other by them."""
    plain, saving = build(encoder='tu-resnet10t'), build(encoder='tu-resnet10t', activation_checkpointing=True)
    saving.load_state_dict(plain.state_dict())
    images, gradients = pictures(2, 3, 32, 32), []
    for model in (plain, saving):
        weights = [*model.train().network.encoder.parameters()]
        logits = model(images)
        gradients += [torch.autograd.grad(answer.mean(), weights, retain_graph=True)
                      for answer in (logits, logits.square())]
    assert all(map(torch.equal, gradients[0] + gradients[1], gradients[2] + gradients[3]))
    for usual, ours in zip(plain.buffers(), saving.buffers(), strict=True):
        assert torch.equal(usual, ours)


def test_a_network_of_which_the_library_knows_no_levels_is_refused_in_words():
    with pytest.raises(tu.ConfigError, match='encoder=.tu-nest_tiny.: IndexError: list index'):
        build(encoder='tu-nest_tiny', image_size=[224, 224])


def test_a_network_that_runs_out_of_levels_takes_no_images_of_this_size():
    class Levels(nn.Conv2d):
        def forward(self, images):
            return [super().forward(images)][images.shape[-1] // 8]

    assert [tu.takes(Levels(3, 1, 1), torch.zeros(1, 3, side, side)) for side in (4, 8)] == [True, False]


def test_advice_on_size_names_the_one_that_an_encoder_takes():
    """Twice the size was advised, and refused in its turn, for ever."""
    model = build(encoder='tu-test_maxvit', image_size=[64, 64])
    with pytest.raises(tu.ConfigError, match='type another image_size, such as 160$'):
        tu.try_size(model)


def test_activation_checkpointing_of_a_network_that_takes_no_small_images():
    model = build(architecture='PAN', encoder='resnet18', image_size=[128, 128],
                  activation_checkpointing=True)
    assert any(isinstance(block, tu.Checkpointed) for block in model.network.encoder.modules())
    assert model(pictures(2, 3, 128, 128)).requires_grad


def test_a_deep_encoder_does_not_make_the_whole_decoder_one_recomputed_block():
    """Its second pass, at the size of the images, would be the peak of memory."""
    decoder = build(encoder='resnet34', activation_checkpointing=True).network.decoder
    assert not isinstance(decoder, tu.Checkpointed)
    assert all(isinstance(block, tu.Checkpointed) for block in decoder.blocks)


def test_activation_checkpointing_of_a_network_that_takes_one_size():
    """As the transformers of timm do that are named after a size."""
    class OneSize(nn.Module):
        def __init__(self):
            super().__init__()
            block = lambda width: nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.blocks, self.head = nn.Sequential(*(block(width) for width in (3, 4, 4, 4))), nn.Conv2d(4, 1, 1)

        def forward(self, images):
            assert images.shape[-2:] == (96, 96), 'Input size does not match the model'
            return self.head(self.blocks(images))

    model = tu.build_model({**BASE, 'image_size': [96, 96], 'activation_checkpointing': True}, OneSize())
    assert [isinstance(block, tu.Checkpointed) for block in model.network.blocks] == [True] * 4
    assert model.training and model(pictures(2, 3, 96, 96)).requires_grad
    with pytest.raises(tu.ConfigError, match='does not match the model'):
        tu.build_model({**BASE, 'image_size': [64, 64], 'activation_checkpointing': True}, OneSize())


def test_activation_checkpointing_computes_once_where_no_gradient_is_wanted():
    model = build(encoder='resnet18', activation_checkpointing=True).train()
    count = dtypes_of_outputs(model.network.encoder, nn.Conv2d)
    with torch.no_grad():
        model(pictures(2, 3, 64, 64))
    assert len(count) == sum(isinstance(m, nn.Conv2d) for m in model.network.encoder.modules())


# --- the loss -------------------------------------------------------------------------


@pytest.mark.parametrize('kind, expected', [
    ('ce', math.log(2)), ('focal', 0.25 * math.log(2)),
    ('dice', 1 - (2 * 0.5 + 1) / (1.5 + 1 + 1)), ('ce+dice', math.log(2) + 1 - 2 / 3.5)])
def test_binary_loss_by_hand(kind, expected):
    target = torch.tensor([[[1, 0], [IGNORED, 0]]])  # logits 0: every probability is a half
    losses = loss_of(loss=kind).losses(torch.zeros(1, 1, 2, 2), target)
    assert losses.tolist() == pytest.approx([expected])


@pytest.mark.parametrize('kind, expected', [
    ('ce', math.log(4)), ('focal', 0.75 ** 2 * math.log(4)),
    ('dice', sum(1 - dice - 0.3 * math.log(dice) for dice in
                 [(0.5 * 2 + 1) / (0.75 + 2 + 1), (0.25 * 2 + 1) / (0.75 + 1 + 1)]) / 2)])
def test_multiclass_loss_by_hand(kind, expected):
    target = torch.tensor([[[1, 1], [2, IGNORED]]])  # classes 0 and 3 are not in the image: no Dice
    loss = loss_of(loss=kind, num_classes=4)
    assert loss.losses(torch.zeros(1, 4, 2, 2), target).tolist() == pytest.approx([expected])


LOSSES = ['ce', 'dice', 'focal', 'ce+dice', 'focal+dice']


@pytest.mark.parametrize('kind', LOSSES)
@pytest.mark.parametrize('channels', [1, 3])
def test_one_value_per_image_whatever_else_is_in_the_batch(kind, channels):
    loss = loss_of(loss=kind, num_classes=max(2, channels))
    logits, target = torch.randn(5, channels, 6, 7), torch.randint(0, max(2, channels), (5, 6, 7))
    target[0, :4], target[1] = IGNORED, IGNORED
    alone = torch.cat([loss.losses(logits[i:i + 1], target[i:i + 1]) for i in range(5)])
    together = loss.losses(logits, target)
    assert together.shape == (5,)
    assert torch.allclose(together, alone, rtol=1e-6, atol=1e-7)


def test_the_loss_of_a_batch_is_that_of_its_images_through_the_network():
    model, loss = build().eval(), loss_of()
    batch = {'image': pictures(3, 3, 32, 32), 'mask': pictures(3, 32, 32) % 2}
    together, counts = loss(model, batch)
    alone = [loss(model, {key: value[i:i + 1] for key, value in batch.items()}) for i in range(3)]
    assert torch.allclose(together, torch.cat([losses for losses, _ in alone]), atol=1e-5)
    assert counts.sum() == 3 * 32 * 32
    assert torch.equal(counts, sum(part for _, part in alone))


@pytest.mark.parametrize('kind', LOSSES)
@pytest.mark.parametrize('channels', [1, 3])
def test_ignored_pixels_have_no_gradient_and_all_others_have(kind, channels):
    logits = torch.randn(2, channels, 4, 4, requires_grad=True)
    target = torch.randint(0, max(2, channels), (2, 4, 4))
    target[:, :2] = IGNORED
    loss_of(loss=kind, num_classes=max(2, channels)).losses(logits, target).sum().backward()
    assert logits.grad[:, :, :2].abs().max() == 0
    assert logits.grad[:, :, 2:].abs().min() > 0


@pytest.mark.parametrize('kind', LOSSES)
@pytest.mark.parametrize('channels', [1, 3])
def test_sure_and_wrong_logits_give_finite_numbers(kind, channels):
    logits = torch.full((1, channels, 4, 4), 6e4)
    logits[:, -1] = -6e4
    logits.requires_grad_()
    loss = loss_of(loss=kind, num_classes=max(2, channels))
    losses = loss.losses(logits, torch.full((1, 4, 4), max(1, channels - 1)))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('kind', LOSSES)
def test_a_large_map_of_16_bit_logits_is_summed_in_float32(kind, dtype):
    network = nn.Conv2d(1, 1, 1)  # 512 x 512 = 262,144 pixels; float16 ends at 65,504
    nn.init.constant_(network.weight, 2)
    nn.init.constant_(network.bias, 1)
    batch = {'image': torch.ones(1, 1, 512, 512), 'mask': torch.ones(1, 512, 512).byte()}
    batch['mask'][:, :100] = 0
    losses, _ = tu.run_loss(loss_of(loss=kind), network, dtype, batch)
    logits = torch.full((1, 1, 512, 512), 3.0, dtype=torch.float64)
    exact = loss_of(loss=kind).losses(logits, batch['mask'].long())
    assert losses.dtype == torch.float32
    assert losses.item() == pytest.approx(exact.item(), rel=1e-4)


def test_a_class_that_is_hardly_found_still_learns():
    """Its probability is 1e-4: of Dice alone it would get a gradient more than ten times smaller."""
    target = torch.zeros(1, 32, 32, dtype=torch.long)
    target[:, :16, :16] = 2
    logits = torch.zeros(1, 3, 32, 32)
    logits[:, 2] = -9.2
    truth = F.one_hot(target, 3).permute(0, 3, 1, 2)

    def plain_dice(logits, target):
        chance = logits.softmax(1)
        dice = (2 * (chance * truth).sum((2, 3)) + 1) / ((chance + truth).sum((2, 3)) + 1)
        return 1 - dice[:, ::2].mean(1)                                # class 1 is not in the image

    pulls = []
    for loss in (loss_of(loss='dice', num_classes=3).losses, plain_dice):
        [slope] = torch.autograd.grad(loss(logits.requires_grad_(), target).sum(), logits)
        pulls.append(-slope[0, 2, :16, :16].sum().item())
    assert pulls[0] > 10 * pulls[1] > 0


def test_masks_are_scored_at_their_original_size():
    batch = {'image': pictures(2, 3, 32, 32), 'mask': torch.zeros(2, 32, 32).byte(),
             'full_mask': [torch.ones(50, 70).byte(), torch.zeros(11, 9).byte()]}
    batch['full_mask'][0][:10] = IGNORED
    _, counts = loss_of()(lambda images: torch.ones(2, 1, 32, 32), batch)
    assert counts.tolist() == [[0, 11 * 9], [0, 40 * 70]]


# --- class weights --------------------------------------------------------------------


def test_class_weights_weigh_the_entropy_of_their_class_and_no_dice():
    target = torch.tensor([[[0, 0], [0, 1]]])
    weighted = {'loss': 'ce', 'class_weights': torch.tensor([1.0, 5.0])}
    ce = loss_of(**weighted).losses(torch.zeros(1, 1, 2, 2), target)
    assert ce.item() == pytest.approx((3 + 5) / 4 * math.log(2))
    dice = loss_of(**weighted | {'loss': 'dice'}).losses(torch.zeros(1, 1, 2, 2), target)
    assert dice.item() == pytest.approx(1 - 2 / 4)


def test_automatic_class_weights_favour_rare_classes_and_keep_the_mean():
    shares = torch.tensor([0.9, 0.09, 0.01]).double().numpy()
    data = SimpleNamespace(shares=shares)
    weights = tu.build_class_weights({**tu.CONFIG, 'class_weights': 'auto', 'num_classes': 3}, data).double()
    assert (weights * torch.from_numpy(shares)).sum() == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(math.sqrt(10))
    assert weights[0] < weights[1] < weights[2]
    data = SimpleNamespace(shares=torch.tensor([0.9, 0.1, 0]).numpy())     # one that no training mask has
    weights = tu.build_class_weights({**tu.CONFIG, 'class_weights': 'auto', 'num_classes': 3}, data)
    assert weights[1] < weights[2] == 20


def test_class_weights_of_the_wrong_number_are_refused():
    with pytest.raises(tu.ConfigError, match='2 factors for 3 classes'):
        tu.build_class_weights({'class_weights': [1.0, 2.0], 'num_classes': 3, 'loss': 'ce'}, None)


def test_class_weights_without_cross_entropy_are_told(caplog):
    config = {**tu.CONFIG, 'num_classes': 2, 'class_weights': [1.0, 2.0]}
    for kind, told in (('ce', 0), ('dice', 1)):
        caplog.clear()
        tu.build_class_weights({**config, 'loss': kind}, None)
        assert len(caplog.records) == told


def test_class_weights_travel_to_the_device_once():
    """A copy from the host in each step would wait for the device."""
    loss_fn = tu.SegmentationLoss({**tu.CONFIG, 'num_classes': 2, 'image_size': [4, 4]}, torch.ones(2))
    loss_fn.losses(torch.zeros(1, 1, 4, 4, device='meta'), torch.zeros(1, 4, 4, dtype=torch.long, device='meta'))
    assert loss_fn.class_weights.device.type == 'meta'


# --- from scores to a mask ------------------------------------------------------------


@pytest.mark.parametrize('channels, size', [(64, (120, 90)), (1, (300, 310))])
def test_strips_decide_as_the_whole_does(channels, size, monkeypatch):
    logits = torch.randn(channels, 70, 40)
    assert tu.enlarged_bands.__defaults__ == (2 ** 26,)                # 256 MB
    monkeypatch.setattr(tu.enlarged_bands, '__defaults__', (2 ** 16,))
    assert channels * size[0] * size[1] > 2 ** 16                      # more than one strip
    real, sizes = F.interpolate, []
    monkeypatch.setattr(F, 'interpolate',
                        lambda x, size, **how: sizes.append(size) or real(x, size, **how))
    mask = tu.decide(logits, size)
    large = real(logits[None], size, mode='bilinear', align_corners=False)[0]
    differ = mask != (large.argmax(0) if channels > 1 else large[0] > 0)
    assert size not in sizes                                           # it would fill the memory
    assert differ.float().mean() < 1e-3
    if differ.any():                                                   # at a tie rounding may decide
        scores = F.pad(large[:, differ], (0, 0, 0, channels == 1))
        assert scores.topk(2, 0).values.diff(dim=0).abs().lt(1e-4).all()


@pytest.mark.parametrize('most', [2 ** 26, 2 ** 12])
def test_logits_are_enlarged_in_the_usual_layout(monkeypatch, most):
    """In channels_last it takes twice as long."""
    real, seen = F.interpolate, []
    monkeypatch.setattr(F, 'interpolate', lambda x, *a, **how: seen.append(x.is_contiguous()) or real(x, *a, **how))
    bands = [*tu.enlarged_bands(torch.randn(20, 30, 8).movedim(-1, 0), (60, 50), most)]
    assert seen == [True] and sum(band.shape[1] for band in bands) == 60


@pytest.mark.parametrize('threshold, expected', [(0.25, 1), (0.5, 0)])
def test_the_threshold_is_one_of_probability(threshold, expected):
    logits = torch.tensor([[[math.log(0.3 / 0.7)]]])
    assert tu.decide(logits, (3, 2), threshold).tolist() == [[expected] * 2] * 3


# --- tiles ----------------------------------------------------------------------------


def test_of_a_row_of_tiles_a_group_at_a_time_is_in_memory():
    """All of 21 classes and 8,000 pixels were, with those of the row before."""
    outputs, most = [], []

    def model(images):
        made = images[:, :1] * 2
        outputs.append(weakref.ref(made))
        most.append(sum(one() is not None for one in outputs))
        return made

    image = torch.rand(1, 3, 100, 600)
    rows = lambda first, last: image[..., first:last, :]
    bands = [*tu.tiled_bands(model, rows, (100, 600), (64, 64), batch_size=2, reach=0)]
    assert torch.allclose(torch.cat(bands, 1), image[0, :1] * 2) and len(outputs) > 12 and max(most) <= 2


def remember_sizes(network):
    """The network, and a list of the sizes that it is given."""
    sizes = []
    network.register_forward_pre_hook(lambda m, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
    return network, sizes


@pytest.mark.parametrize('size, tile', [
    ((70, 100), (32, 32)), ((20, 100), (32, 48)), ((150, 97), (64, 96)), ((33, 32), (32, 32)),
    ((40, 50), (16, 16)), ((60, 60), (24, 40))])
def test_tiles_of_a_pointwise_network_join_to_the_whole(size, tile):
    network, sizes = remember_sizes(nn.Conv2d(2, 3, 1))
    images = torch.randn(1, 2, *size)
    whole = network(images)
    sizes.clear()
    assert (tu.tiled_logits(network, images, tile) - whole).abs().max() < 1e-5
    assert len(sizes) > 1 and all(h <= tile[0] and w <= tile[1] for h, w in sizes)


@pytest.mark.parametrize('size, last', [((150, 130), 7), ((64, 200), 9), ((129, 64), 11), ((97, 101), 11)])
def test_tiles_of_a_shallow_network_equal_the_whole(size, last):
    """Receptive fields of 11 to 15 pixels, the overlap being 16; at the image's own rim both pad with zeros."""
    network = nn.Sequential(nn.Conv2d(2, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 3, last, padding=last // 2))
    images = torch.randn(1, 2, *size)
    with torch.no_grad():
        whole, tiled = network(images), tu.tiled_logits(network, images, (64, 64))
    assert (tiled - whole).abs().max() < 1e-5


@pytest.mark.parametrize('tile', [24, 32, 40, 42, 64])
def test_tiles_of_a_shallow_network_equal_the_whole_at_any_width(tile):
    torch.manual_seed(0)
    network = nn.Conv2d(3, 1, 3, padding=1)
    for width in range(tile, 3 * tile + 3):
        images = torch.randn(1, 3, tile + 1, width)
        with torch.no_grad():
            whole, tiled = network(images), tu.tiled_logits(network, images, (tile, tile))
        assert (whole - tiled).abs().max() < 1e-5, width


@pytest.mark.parametrize('length, side', [(150, 64), (1000, 256), (257, 256), (4000, 512), (65, 64), (40, 32)])
def test_tiles_begin_on_the_grid_of_the_network_and_cover_everything(length, side):
    begins = tu.tile_offsets(length, side, 0.25)
    assert begins[0] == 0 and begins[-1] < length <= begins[-1] + side
    assert all(0 < b - a <= 0.75 * side for a, b in itertools.pairwise(begins))
    assert side < 43 or all(begin % 32 == 0 for begin in begins)


@pytest.mark.parametrize('reach', [0, 3, 7, 8, 30])
def test_a_tile_counts_fully_in_its_middle_and_nothing_that_it_cannot_know(reach):
    first, middle, last = tu.tile_weights([0, 48, 96], 64, 0.25, reach)
    assert torch.allclose(middle, middle.flip(0)) and torch.allclose(first, last.flip(0))
    assert first[:48].min() == middle[16:-16].min() == middle.max() == 1
    assert torch.allclose(first[48:] + middle[:16], torch.ones(16))
    assert (middle[:33].diff() >= 0).all() and ((middle[:reach] < 1e-7).all() or reach > 7)


def test_weights_rise_over_half_of_the_overlap_where_no_pixel_of_it_is_exact():
    """A cut would show: the step from 0 to 1 in one pixel."""
    line = tu.tile_weights([0, 96, 192], 128, 0.25, 60)[1, :64]
    assert line.diff().max() < 0.07 and line[7] < 1e-7 and line[24:].min() == 1
    both = line[:32] + line[:32].flip(0)                               # this tile's and the next one's
    assert ((both[8:24] - 1).abs() < 0.07).all()


def test_an_image_that_fits_is_not_cut():
    network, sizes = remember_sizes(nn.Conv2d(2, 1, 3, padding=1))
    images = torch.randn(1, 2, 30, 64)
    logits = tu.tiled_logits(network, images, (32, 64), reach=0)
    assert sizes == [(30, 64)] and torch.equal(logits, network(images))


def test_validation_by_sliding_window_never_shows_more_than_a_tile():
    network, sizes = remember_sizes(nn.Conv2d(3, 1, 1))
    batch = {'image': torch.randn(1, 3, 50, 80), 'mask': torch.zeros(1, 50, 80, dtype=torch.uint8),
             'full_mask': [torch.zeros(50, 80, dtype=torch.uint8)]}
    _, counts = loss_of(size_policy='crop')(network, batch)
    assert max(sizes) == (32, 32) and all(max(size) <= 32 for size in sizes)
    assert counts.sum() == 50 * 80


@pytest.mark.parametrize('most', [8, 3, 1])
def test_tiles_of_validation_go_together_as_far_as_memory_allows(most):
    network, seen = nn.Conv2d(3, 1, 3, padding=1), []

    def full_above(module, inputs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError('out of memory')
        seen.append(len(inputs[0]))

    batch = {'image': torch.randn(1, 3, 40, 200), 'mask': torch.zeros(1, 40, 200, dtype=torch.uint8),
             'full_mask': [torch.zeros(40, 200, dtype=torch.uint8)]}
    loss_fn = loss_of(size_policy='crop', batch_size=8)
    network.register_forward_pre_hook(full_above)
    losses, counts = loss_fn(network, batch)
    assert max(seen) == min(most, 7) and counts.sum() == 40 * 200
    network._forward_pre_hooks.clear()
    alone, _ = loss_of(size_policy='crop', batch_size=1)(network, batch)
    assert torch.allclose(losses, alone, atol=1e-6)


# --- the reach of a network -----------------------------------------------------------


@pytest.mark.parametrize('layers, reach', [
    ([nn.Conv2d(3, 2, 1)], 0), ([nn.Conv2d(3, 2, 3, padding=1)], 1),
    ([nn.Conv2d(3, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 1, 11, padding=5)], 7),
    ([nn.Conv2d(3, 1, 29, padding=14)], 14), ([nn.Conv2d(3, 1, 31, padding=15)], 48),
    ([nn.Conv2d(3, 4, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)], 3)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.uint8])
def test_the_reach_of_a_network_is_half_its_receptive_field(layers, reach, dtype):
    network = nn.Sequential(*layers)
    images = torch.zeros(1, 3, 1, 9, dtype=dtype)
    assert tu.find_reach(lambda tile: network(tile.float()), images, (32, 48)) == reach


def test_the_reach_is_seen_on_images_as_bright_as_those_of_the_set():
    """Beside a mean of 30,000 noise of 0 to 1 is none: after normalisation nothing would change."""
    model = tu.build_model({**BASE, 'image_dtype': 'float32', 'mean': [30_000.0], 'std': [75.0]}).eval()
    reach = [tu.find_reach(tu.UnderAutocast(model, 'bfloat16'), torch.zeros(1, 3, 1, 1), (64, 64), config)
             for config in (None, model.config)]
    assert reach == [0, 64]


def test_a_network_that_looks_at_the_whole_tile_reaches_all_of_it():
    """Half the short side would pass for its reach along the long side, and tiles be cut there, not blended."""
    class Whole(nn.Module):
        def forward(self, images):
            return images - images.mean((2, 3), keepdim=True)

    assert tu.find_reach(Whole(), torch.zeros(1, 3, 1, 1), (32, 48)) == 48
