"""Devices as a mesh, and what lies where on it. The only room that names a mesh axis."""
