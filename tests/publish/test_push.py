"""timm-rep push, with the Hub's own client; and back with create_model(pretrained=True)."""
import re

import pytest
import timm

from tests.hub.published import publish, same
from timm_rep.cli import main
from timm_rep.hub import write_hashes, write_model
from timm_rep.publish import push as push_module
from timm_rep.publish.push import push_folder

NAME = 'repa_deit_tiny.mine'
REPO = f'we/{NAME}'


@pytest.fixture
def folder(tmp_path):
    return tmp_path / 'hub' / NAME


@pytest.fixture
def account(hub, monkeypatch):
    hub.tokens.add('hf_secret')
    hub.organizations.append('we')
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    monkeypatch.setenv('TIMM_REP_ORG', 'we')
    return hub


def whats(changes):
    return {change.file: change.action for change in changes}


def test_round_trip(account, folder, capsys):
    model, files = publish(folder)
    assert main(['push', str(folder)]) == 0
    out = capsys.readouterr().out
    assert 'add     model.safetensors (' in out
    assert f'{REPO}: has 2 changes in one commit.' in out
    there = account.files(REPO)
    assert {name: there[name] for name in files} == files
    assert len(account.commits(REPO)) == 2
    assert not account.is_private(REPO)
    assert same(timm.create_model(NAME, pretrained=True), model)


def test_a_folder_named_after_another_model(account, folder):
    publish(folder)
    other = folder.rename(folder.with_name('repa_deit_small.mine'))
    with pytest.raises(ValueError, match=r"Expected a repa_deit_small in .*, but got a repa_deit_tiny"):
        push_folder(other, 'we')
    assert not account.requests


def test_what_is_there_is_not_sent_again(account, folder):
    publish(folder)
    push_folder(folder, 'we')
    account.clear_requests()
    assert set(whats(push_folder(folder, 'we')).values()) == {'same'}
    assert len(account.commits(REPO)) == 2
    assert not [request for request in account.requests if request.method != 'GET']
    (folder / 'notes.txt').write_text('new')
    write_hashes(folder)
    assert whats(push_folder(folder, 'we')) == {
        'config.json': 'change', 'model.safetensors': 'same', 'notes.txt': 'add'}
    assert not [request for request in account.requests if request.method == 'PUT']
    (folder / 'notes.txt').unlink()
    write_hashes(folder)
    assert whats(push_folder(folder, 'we'))['notes.txt'] == 'delete'
    assert 'notes.txt' not in account.files(REPO)
    assert len(account.commits(REPO)) == 4


def test_dry_run(account, folder, capsys):
    publish(folder)
    assert main(['push', str(folder), '--dry-run', '--org', 'we']) == 0
    assert f'{REPO}: would have 2 changes.' in capsys.readouterr().out
    assert REPO not in account.repos
    push_folder(folder, 'we')
    publish(folder, seed=1)
    assert whats(push_folder(folder, 'we', dry_run=True)) == {'config.json': 'change', 'model.safetensors': 'change'}
    assert len(account.commits(REPO)) == 2


def test_private_and_branches(account, folder):
    publish(folder)
    push_folder(folder, 'we', private=True, message='First')
    assert account.is_private(REPO)
    assert account.message(REPO) == 'First'
    model, _ = publish(folder, seed=1)
    push_folder(folder, 'we', revision='next')
    assert same(timm.create_model(f'hf-hub:{REPO}@next', pretrained=True), model)
    assert not same(timm.create_model(f'hf-hub:{REPO}', pretrained=True), model)


def test_a_new_branch_holds_what_the_folder_does(account, folder):
    """The new branch starts with the files of the main one."""
    publish(folder)
    (folder / 'notes.txt').write_text('old')
    write_hashes(folder)
    push_folder(folder, 'we')
    (folder / 'notes.txt').unlink()
    write_hashes(folder)
    expected = {'config.json': 'change', 'model.safetensors': 'same', 'notes.txt': 'delete'}
    assert whats(push_folder(folder, 'we', revision='next', dry_run=True)) == expected
    assert whats(push_folder(folder, 'we', revision='next')) == expected
    assert 'notes.txt' not in account.files(REPO, 'next')
    assert 'notes.txt' in account.files(REPO)


def test_a_new_branch_without_changes(account, folder):
    publish(folder)
    push_folder(folder, 'we')
    assert {*whats(push_folder(folder, 'we', revision='next', dry_run=True)).values()} == {'same'}
    with pytest.raises(Exception, match='next'):
        account.files(REPO, 'next')
    assert {*whats(push_folder(folder, 'we', revision='next')).values()} == {'same'}
    assert account.commits(REPO, 'next') == account.commits(REPO)


def test_a_commit_in_between(account, folder, monkeypatch):
    """Files that somebody else pushed since the branch was looked at are not overwritten."""
    publish(folder)
    push_folder(folder, 'we')
    publish(folder, seed=1)
    look = push_module._branch

    def look_and_be_overtaken(*args):
        found = look(*args)
        account.add(REPO, {'notes.txt': b'theirs'})
        return found

    monkeypatch.setattr(push_module, '_branch', look_and_be_overtaken)
    with pytest.raises(OSError, match='412'):
        push_folder(folder, 'we')
    assert account.files(REPO)['notes.txt'] == b'theirs'


def test_no_connection(account, folder, capsys):
    publish(folder)
    account.stop()
    assert main(['push', str(folder)]) == 1
    assert 'The Hub cannot be reached' in capsys.readouterr().err


@pytest.mark.parametrize('content', [[], {}, 'x', 3], ids=str)
def test_an_unexpected_answer(account, folder, capsys, content):
    publish(folder)
    account.fail('/api/models/', status=200, content=content)
    assert main(['push', str(folder)]) == 1
    assert 'The Hub gave an unexpected answer' in capsys.readouterr().err


def test_folded(account, folder, capsys):
    publish(folder)
    assert main(['push', str(folder), '--folded']) == 0
    assert f'{REPO}_folded: has' in capsys.readouterr().out
    assert timm.create_model(f'{NAME}_folded', pretrained=True).reparameterized
    assert not (folder.parent / f'{NAME}_folded').exists()


def test_a_model_without_a_folded_form(account, tmp_path, capsys):
    folder = tmp_path / 'test_resnet.mine'
    folder.mkdir()
    write_model(timm.create_model('test_resnet'), folder, tag='mine')
    write_hashes(folder)
    assert main(['push', str(folder), '--folded']) == 1
    assert 'Expected a model with a folded form, but test_resnet has none' in capsys.readouterr().err
    assert main(['push', str(folder)]) == 0


def test_refused_before_anything_is_sent(account, folder, tmp_path, capsys):
    publish(folder)
    (folder / 'stray.txt').write_text('?')
    with pytest.raises(RuntimeError, match=r'sha256 of stray\.txt: run timm-rep card'):
        push_folder(folder, 'we')
    (folder / 'stray.txt').unlink()
    weights = (folder / 'model.safetensors').read_bytes()
    (folder / 'model.safetensors').write_bytes(weights[:-1])
    with pytest.raises(RuntimeError, match=r'expected sha256 .* write the model again with timm_rep\.export'):
        push_folder(folder, 'we')
    (folder / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match=r'model\.safetensors'):
        push_folder(folder, 'we')
    for name in ('nothing', 'vit_tinny.x'):
        assert main(['push', str(tmp_path / name)]) == 1
        assert 'MODEL.TAG' in capsys.readouterr().err
    publish(folder)
    assert main(['push', str(folder), '--org', 'strangers']) == 1
    assert 'strangers' in capsys.readouterr().err
    assert not account.repos


def test_interrupted_upload(account, folder):
    """Nothing is there before all is."""
    publish(folder)
    account.fail(r'/commit/', status=503, times=20)
    with pytest.raises(OSError, match='503'):
        push_folder(folder, 'we')
    assert 'model.safetensors' not in account.files(REPO)
    account.clear_faults()
    push_folder(folder, 'we')
    assert 'model.safetensors' in account.files(REPO)


@pytest.mark.parametrize('name', [
    'model.onnx', 'model.onnx.data', 'model.pt2', 'model.xml', 'model.bin', 'model.pte', 'old/Best.CKPT', 'a.pth.tar'])
def test_weights_are_deleted_only_by_name(account, folder, name):
    publish(folder)
    account.add(REPO, {'model.safetensors': b'x', name: b'theirs', 'notes.txt': b'theirs'})
    for dry_run in False, True:
        with pytest.raises(ValueError, match=re.escape(f'--delete {name}')):
            push_folder(folder, 'we', dry_run=dry_run, delete=['notes.txt'])
    assert account.files(REPO)[name] == b'theirs'
    assert main(['push', str(folder), '--org', 'we', '--delete', name]) == 0
    assert not {name, 'notes.txt'} & account.files(REPO).keys()


def test_a_folder_without_weights(account, folder):
    """A folder without weights gets no card and is not pushed, whatever its config.json says."""
    publish(folder)
    push_folder(folder, 'we')
    (folder / 'model.safetensors').unlink()
    assert main(['card', str(folder)]) == 1
    write_hashes(folder)
    with pytest.raises(FileNotFoundError, match=r'model\.safetensors'):
        push_folder(folder, 'we', dry_run=True)
    assert 'model.safetensors' in account.files(REPO)


def test_the_card_names_the_repository(account, folder, capsys):
    """A card of another organization is refused; with --org, it is written for the one that publishes the folder."""
    publish(folder)
    assert main(['card', str(folder), '--device', 'cpu', '--org', 'others']) == 0
    assert main(['push', str(folder)]) == 1
    assert f'timm-rep card {folder} --org we' in capsys.readouterr().err
    assert not account.repos
    assert main(['card', str(folder), '--device', 'cpu', '--org', 'we']) == 0
    assert main(['push', str(folder)]) == 0
    card = account.files(REPO)['README.md'].decode()
    assert f"timm.create_model('hf-hub:{REPO}', pretrained=True)" in card
    assert 'timm-rep/repa' not in card
    assert main(['push', str(folder), '--folded', '--org', 'we']) == 0
    assert f"'hf-hub:{REPO}_folded'" in account.files(f'{REPO}_folded')['README.md'].decode()
