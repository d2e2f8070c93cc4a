"""For the final model, when time does not matter.

Costs: 200 epochs, which only small sets have by default, of a larger encoder with stronger augmentation.
Add encoder_weights=imagenet for photographs (downloads once).
"""
config = {
    'encoder': 'resnet50',
    'augment': 'strong',
    'num_epochs': 200,
    'early_stopping_patience': 40,
}
