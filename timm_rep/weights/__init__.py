from .published import CONFIG, SCALES, WEIGHTS, Published, reaching_hub, sha256
from .released import RELEASE, USUAL_RATIO, fetch_released, has_release
from .sources import find_weights, local_tags, organization

__all__ = [
    'CONFIG',
    'RELEASE',
    'SCALES',
    'USUAL_RATIO',
    'WEIGHTS',
    'Published',
    'fetch_released',
    'find_weights',
    'has_release',
    'local_tags',
    'organization',
    'reaching_hub',
    'sha256',
]
