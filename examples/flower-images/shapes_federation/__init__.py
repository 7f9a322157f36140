"""Federated training of a custom model on folders of images."""
