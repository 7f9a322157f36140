"""Keys of nodes for tests."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_key(number: int) -> tuple[bytes, str]:
    """Return the public key of a number, as the SuperLink stores it and as the line of a `.pub` file."""
    public = ec.derive_private_key(number + 2, ec.SECP384R1()).public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return pem, line.decode()
