"""GLM-4.5, 4.6 and 4.7: DeepSeek's head around GLM's layers.

Sources are transformers' ``MtpModel`` for ``glm4_moe``, SGLang's and vLLM's models of both.
"""

from __future__ import annotations

from .deepseek import AppendedFamily, DeepSeekFamily


class Glm4Family(AppendedFamily):
    """GLM-4.5 to 4.7: grouped-query attention; embedding and output head are the trunk's."""


class Glm4LiteFamily(DeepSeekFamily):
    """GLM-4.7-Flash: latent attention, and an embedding and output head in the checkpoint.

    Sources disagree on whether those are copies of the trunk's: used as stored, they are right
    either way.
    """

    copies = False
