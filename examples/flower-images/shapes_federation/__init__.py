"""A model of one's own on folders of images, federated."""
