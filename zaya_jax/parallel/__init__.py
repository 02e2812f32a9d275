"""Device meshes, collectives and processes. The only package that names a mesh axis."""
