"""Random JSON schemas: types, nesting, enums, references, bounds, patterns and formats."""

import random

PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]*-[0-9]{1,3}$", "ab+c", "^(yes|no|maybe)$", r"^\d{3}$", "[xyz]$")
FORMATS = ("date", "ipv4", "uuid", "email", "ipv6")
MAX_DEPTH = 3


class SchemaWriter:
    """Writes the schemas of one seed. All are bounded, so that a random model completes most answers."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._definitions = {}

    def write(self):
        """Returns a schema of an object, with the definitions that it refers to."""
        self._definitions = {f"D{i}": self._any(2) for i in range(self._random.randint(0, 2))}
        schema = self._object(0)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth):
        kinds = [self._string, self._string, self._integer, self._number, self._constant, self._simple]
        if depth < MAX_DEPTH:
            kinds += [self._object, self._array, self._choice, self._object, self._array]
        if self._definitions and self._random.random() < 0.3:
            return {"$ref": f"#/$defs/{self._random.choice(list(self._definitions))}"}
        return self._random.choice(kinds)(depth)

    def _object(self, depth):
        names = self._random.sample(["name", "age", "x", "a b", "naïve", "kind", "$id2", '"q"'], 3)
        properties = {name: self._any(depth + 1) for name in names[: self._random.randint(1, 3)]}
        required = [name for name in properties if self._random.random() < 0.7]
        schema = {"type": "object", "properties": properties, "required": required}
        extra = self._random.random()
        # Without this keyword, any further fields are allowed.
        if extra < 0.8:
            schema["additionalProperties"] = False
        elif extra < 0.9:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        return schema

    def _array(self, depth):
        low = self._random.randint(0, 2)
        schema = {"type": "array", "items": self._any(depth + 1), "minItems": low}
        if self._random.random() < 0.3:
            schema |= {"prefixItems": [self._any(depth + 1)], "minItems": max(low, 1)}
        return schema | {"maxItems": low + self._random.randint(1, 2)}

    def _choice(self, depth):
        if self._random.random() < 0.5:
            return {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(1, 3))]}
        tags = [self._object(depth + 1) for _ in range(2)]
        for number, tag in enumerate(tags):
            tag["properties"] = {"tag": {"const": f"t{number}"}} | tag["properties"]
            tag["required"] = ["tag", *tag["required"]]
        return {"oneOf": [*tags, {"type": "null"}]}

    def _string(self, depth):
        del depth
        kind = self._random.random()
        if kind < 0.25:
            return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 12}
        if kind < 0.5:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 6)}

    def _integer(self, depth):
        del depth
        low = self._random.randint(-1000, 1000)
        schema = {"type": "integer", "minimum": low, "maximum": low + self._random.randint(3, 500)}
        return schema | ({"multipleOf": 3} if self._random.random() < 0.2 else {})

    def _number(self, depth):
        del depth
        low = round(self._random.uniform(-10, 10), 2)
        name = self._random.choice(["minimum", "exclusiveMinimum"])
        return {"type": "number", name: low, "maximum": round(low + self._random.uniform(1, 50), 2)}

    def _constant(self, depth):
        del depth
        values = [self._random.choice(["red", "grün", 'a"b', 7, 2.5, True, None, [1, "x"], {"k": [None]}])]
        if self._random.random() < 0.3:
            return {"const": values[0]}
        return {"enum": [*values, *self._random.sample(["blue", 11, "", False, "\n"], 2)]}

    def _simple(self, depth):
        del depth
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}
