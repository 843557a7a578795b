"""Headless Chromium by its DevTools protocol, over pipes: no driver and no further package."""
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

_TIMEOUT = 120.  # seconds for one answer; a page of a few files takes far less, a busy machine does not


def find_chromium() -> Optional[str]:
    """Path of Chromium or Chrome, or None."""
    names = 'chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """A tab, with what went wrong in it since it was opened.

    Attributes:
        errors: Exceptions, errors of the console, and files that did not load.
    """

    def __init__(self, process: subprocess.Popen, read: int, write: int) -> None:
        self.errors: List[str] = []
        self._process, self._read, self._write = process, read, write
        self._buffer, self._sent, self._loaded, self._session = b'', 0, False, None
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')

    def call(self, method: str, **params: Any) -> Dict[str, Any]:
        """Result of a command of the protocol."""
        self._sent += 1
        message: Dict[str, Any] = {'id': self._sent, 'method': method, 'params': params}
        if self._session:
            message['sessionId'] = self._session
        os.write(self._write, json.dumps(message).encode() + b'\0')
        answer: List[Dict[str, Any]] = []

        def answered(message: Dict[str, Any]) -> bool:
            answer[:] = [message]
            return message.get('id') == self._sent

        self._receive(answered)
        if 'error' in answer[0]:
            raise RuntimeError(f'{method}: {answer[0]["error"]["message"]}')
        return answer[0]['result']

    def open(self, url: str, width: int, height: int = 900) -> None:
        """Load a page in a window of a size in pixels; up to 500 pixels, it is a phone's."""
        self.call(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width <= 500)
        self._loaded = False
        self.call('Page.navigate', url=url)
        if not self._loaded:
            self._receive(lambda message: self._loaded)

    def evaluate(self, expression: str) -> Any:
        """Value of an expression of JavaScript."""
        result = self.call('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        if 'exceptionDetails' in result:
            raise RuntimeError(f'{expression}: {result["exceptionDetails"]["text"]}')
        return result['result'].get('value')

    def wait_for(self, expression: str) -> Any:
        """Value of an expression of JavaScript as soon as it is true."""
        end = time.monotonic() + _TIMEOUT
        while time.monotonic() < end:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(.1)
        raise TimeoutError(f'{expression} is not true after {_TIMEOUT:g} seconds.')

    def _receive(self, is_last: Callable[[Dict[str, Any]], bool]) -> None:
        end = time.monotonic() + _TIMEOUT
        while True:
            while b'\0' in self._buffer:
                text, self._buffer = self._buffer.split(b'\0', 1)
                message = json.loads(text)
                self._note(message.get('method'), message.get('params', {}))
                if is_last(message):
                    return
            if not select.select([self._read], [], [], max(0., end - time.monotonic()))[0]:
                raise TimeoutError(f'Chromium does not answer within {_TIMEOUT:g} seconds.')
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError(f'Chromium ended with status {self._process.wait()}.')
            self._buffer += data

    def _note(self, method: Optional[str], params: Dict[str, Any]) -> None:
        if method == 'Page.loadEventFired':
            self._loaded = True
        elif method == 'Runtime.exceptionThrown':
            details = params['exceptionDetails']
            self.errors.append(details.get('exception', {}).get('description', details['text']))
        elif method == 'Runtime.consoleAPICalled' and params['type'] in ('error', 'assert'):
            self.errors.append(' '.join(str(arg.get('value', arg.get('description'))) for arg in params['args']))
        elif method == 'Log.entryAdded' and params['entry']['level'] == 'error':
            self.errors.append(f'{params["entry"]["text"]} {params["entry"].get("url", "")}')
        elif method == 'Network.responseReceived' and params['response']['status'] >= 400:
            self.errors.append(f'{params["response"]["status"]} {params["response"]["url"]}')


@contextlib.contextmanager
def open_page(chromium: str, profile: os.PathLike) -> Iterator[Page]:
    """A tab of a new browser that reaches 127.0.0.1 only, with its profile in an empty folder."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # the protocol is on descriptors 3 and 4 of the browser, so neither may be the source of the other
    inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (command_read, answer_write)]
    for fd in (command_read, answer_write):
        os.close(fd)
    process = subprocess.Popen(
        ['bash', '-c', f'exec "$@" 3<&{inherited[0]} 4>&{inherited[1]}', 'bash', chromium, '--headless',
         '--remote-debugging-pipe', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run',
         '--disable-background-networking', '--hide-scrollbars', f'--user-data-dir={os.fspath(profile)}',
         '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'],
        pass_fds=inherited, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for fd in inherited:
        os.close(fd)
    try:
        yield Page(process, answer_read, command_write)
    finally:
        for fd in (command_write, answer_read):  # the browser ends with its pipe
            os.close(fd)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
