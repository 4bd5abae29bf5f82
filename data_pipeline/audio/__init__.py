"""Sound: WAV files, waveforms of one length, and the log-mel pictures that an encoder sees.

Comes in: the bytes of a WAV file. Goes out: its points as they were recorded, int16; a batch of them cut or filled to
one length; and a batch's log-mel spectrogram, made on the device of the waveforms. What may never happen: a sound that
is quietly resampled, mixed down to mono, rescaled, or shorter than its file says.
"""
