// An NFS 3 server, and a mount helper over FUSE, for the end-to-end test of charts/shared-storage on a machine whose kernel
// has no NFS client. What goes between the two is NFS 3; what is not tested is Linux's own client.
//
//	go build -o mount.nfs .                      on the node, as /sbin/mount.nfs, which `mount -t nfs` calls
//	./mount.nfs serve DIRECTORY ADDRESS:PORT     the server; anybody may do anything in DIRECTORY
//	TOKENMILL_E2E_NFS=ADDRESS:/ TOKENMILL_E2E_NFS_OPTIONS=vers=3,port=PORT,mountport=PORT,nolock make e2e
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-git/go-billy/v5"
	"github.com/go-git/go-billy/v5/osfs"
	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	server "github.com/willscott/go-nfs"
	client "github.com/willscott/go-nfs-client/nfs"
	"github.com/willscott/go-nfs-client/nfs/rpc"
	"github.com/willscott/go-nfs/helpers"
)

func main() {
	var err error
	switch {
	case len(os.Args) == 4 && os.Args[1] == "serve":
		err = serve(os.Args[2], os.Args[3])
	case len(os.Args) >= 3 && os.Getenv("NFS_STAYS") == "":
		err = start()
	case len(os.Args) >= 3:
		err = mount(os.Args[1], os.Args[2], options(os.Args[3:]))
	default:
		err = errors.New("say: mount.nfs SERVER:/DIRECTORY TARGET -o OPTIONS, or: serve DIRECTORY ADDRESS:PORT")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mount.nfs:", err)
		os.Exit(32)
	}
}

// -- the server

type directory struct{ billy.Filesystem }

func (d directory) at(name string) string                     { return d.Join(d.Root(), name) }
func (d directory) Chmod(name string, mode os.FileMode) error { return os.Chmod(d.at(name), mode) }
func (d directory) Lchown(name string, uid, gid int) error    { return os.Lchown(d.at(name), uid, gid) }
func (d directory) Chown(name string, uid, gid int) error     { return os.Chown(d.at(name), uid, gid) }
func (d directory) Chtimes(name string, read, write time.Time) error {
	return os.Chtimes(d.at(name), read, write)
}

func serve(root, address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	handler := helpers.NewNullAuthHandler(directory{osfs.New(root)})
	return server.Serve(listener, helpers.NewCachingHandler(handler, 65536))
}

// -- the mount helper

// options reads -o a,b=c.
func options(words []string) map[string]string {
	found := map[string]string{}
	for i, word := range words {
		if word == "-o" && i+1 < len(words) {
			for _, each := range strings.Split(words[i+1], ",") {
				name, value, _ := strings.Cut(each, "=")
				found[name] = value
			}
		}
	}
	return found
}

// start leaves a process behind that serves the mount, and waits until it does.
func start() error {
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	stays := exec.Command("/proc/self/exe", os.Args[1:]...)
	stays.Env = append(os.Environ(), "NFS_STAYS=1")
	stays.ExtraFiles = []*os.File{writer}
	stays.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := stays.Start(); err != nil {
		return err
	}
	writer.Close()
	said, _ := io.ReadAll(reader)
	if string(said) != "mounted" {
		return errors.New(string(said))
	}
	return nil
}

func mount(source, target string, with map[string]string) error {
	ready := os.NewFile(3, "ready")
	fail := func(err error) error {
		fmt.Fprint(ready, err)
		return err
	}
	address, dir, _ := strings.Cut(source, ":")
	port, err := strconv.Atoi(with["port"])
	if err != nil {
		return fail(fmt.Errorf("this helper asks no portmapper: give port= (and mountport=)"))
	}
	connection, err := client.DialServiceAtPort(address, port)
	if err != nil {
		return fail(err)
	}
	volume, err := (&client.Mount{Client: connection}).Mount(dir, rpc.NewAuthUnix("node", 0, 0).Auth())
	if err != nil {
		return fail(err)
	}
	none := time.Duration(0)
	settings := &fs.Options{EntryTimeout: &none, AttrTimeout: &none, NegativeTimeout: &none}
	settings.MountOptions = fuse.MountOptions{AllowOther: true, DirectMount: true, FsName: source, Name: "nfs"}
	mounted, err := fs.Mount(target, &node{volume: &shared{of: volume}}, settings)
	if err != nil {
		return fail(err)
	}
	fmt.Fprint(ready, "mounted")
	ready.Close()
	mounted.Wait()
	return nil
}

// shared lets one call at a time through the connection.
type shared struct {
	sync.Mutex
	of *client.Target
}

type node struct {
	fs.Inode
	volume *shared
}

func (n *node) at(name string) string { return path.Join("/", n.Path(nil), name) }

func code(err error) syscall.Errno {
	var refused *client.Error
	switch {
	case err == nil:
		return 0
	case errors.Is(err, os.ErrNotExist):
		return syscall.ENOENT
	case errors.Is(err, os.ErrExist):
		return syscall.EEXIST
	case errors.As(err, &refused) && refused.ErrorNum < 100:
		return syscall.Errno(refused.ErrorNum) // NFS 3 has Unix's numbers
	}
	return syscall.EIO
}

func fill(out *fuse.Attr, of *client.Fattr) {
	kinds := map[uint32]uint32{1: syscall.S_IFREG, 2: syscall.S_IFDIR, 5: syscall.S_IFLNK}
	out.Mode, out.Size, out.Nlink, out.Ino = kinds[of.Type]|of.FileMode&0o7777, of.Filesize, of.Nlink, of.Fileid
	out.Uid, out.Gid, out.Blocks = of.UID, of.GID, (of.Used+511)/512
	written := of.ModTime()
	out.SetTimes(&written, &written, &written)
}

func (n *node) get(name string) (*client.Fattr, syscall.Errno) {
	found, _, err := n.volume.of.Lookup(name, false)
	if err != nil {
		return nil, code(err)
	}
	of, known := found.(*client.Fattr)
	if !known {
		return nil, syscall.EIO
	}
	return of, 0
}

func (n *node) child(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	of, failed := n.get(n.at(name))
	if failed != 0 {
		return nil, failed
	}
	fill(&out.Attr, of)
	return n.NewInode(ctx, &node{volume: n.volume}, fs.StableAttr{Mode: out.Mode & syscall.S_IFMT, Ino: of.Fileid}), 0
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	return n.child(ctx, name, out)
}

func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.volume.Lock()
	defer n.volume.Unlock()
	of, failed := n.get(n.at(""))
	if failed == 0 {
		fill(&out.Attr, of)
	}
	return failed
}

func (n *node) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	n.volume.Lock()
	defer n.volume.Unlock()
	var wanted client.Sattr3
	if mode, given := in.GetMode(); given {
		wanted.Mode = client.SetMode{SetIt: true, Mode: mode & 0o7777}
	}
	if size, given := in.GetSize(); given {
		wanted.Size = client.SetSize{SetIt: true, Size: size}
	}
	if err := n.volume.of.Setattr(n.at(""), wanted); err != nil {
		return code(err)
	}
	of, failed := n.get(n.at(""))
	if failed == 0 {
		fill(&out.Attr, of)
	}
	return failed
}

func (n *node) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	found, err := n.volume.of.ReadDirPlus(n.at(""))
	var entries []fuse.DirEntry
	for _, each := range found {
		if each.FileName != "." && each.FileName != ".." {
			kind := uint32(syscall.S_IFREG)
			if each.IsDir() {
				kind = syscall.S_IFDIR
			}
			entries = append(entries, fuse.DirEntry{Name: each.FileName, Ino: each.FileId, Mode: kind})
		}
	}
	return fs.NewListDirStream(entries), code(err)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	if _, err := n.volume.of.Mkdir(n.at(name), os.FileMode(mode)); err != nil {
		return nil, code(err)
	}
	return n.child(ctx, name, out)
}

func (n *node) Create(ctx context.Context, name string, _, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	if _, err := n.volume.of.Create(n.at(name), os.FileMode(mode)); err != nil {
		return nil, nil, 0, code(err)
	}
	made, failed := n.child(ctx, name, out)
	return made, nil, fuse.FOPEN_DIRECT_IO, failed
}

func (n *node) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0 // each read asks the server
}

func (n *node) Read(_ context.Context, _ fs.FileHandle, into []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	file, err := n.volume.of.Open(n.at(""))
	if err != nil {
		return nil, code(err)
	}
	count, err := file.ReadAt(into, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, code(err)
	}
	return fuse.ReadResultData(into[:count]), 0
}

func (n *node) Write(_ context.Context, _ fs.FileHandle, data []byte, offset int64) (uint32, syscall.Errno) {
	n.volume.Lock()
	defer n.volume.Unlock()
	file, err := n.volume.of.OpenFile(n.at(""), 0o644)
	if err == nil {
		_, err = file.Seek(offset, io.SeekStart)
	}
	written := 0
	for err == nil && written < len(data) {
		var count int
		count, err = file.Write(data[written:])
		written += count
	}
	return uint32(written), code(err)
}

func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno { return 0 } // each write is synced

func (n *node) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }

func (n *node) Unlink(_ context.Context, name string) syscall.Errno {
	n.volume.Lock()
	defer n.volume.Unlock()
	return code(n.volume.of.Remove(n.at(name)))
}

func (n *node) Rmdir(_ context.Context, name string) syscall.Errno {
	n.volume.Lock()
	defer n.volume.Unlock()
	return code(n.volume.of.RmDir(n.at(name)))
}

func (n *node) Rename(_ context.Context, name string, to fs.InodeEmbedder, toName string, _ uint32) syscall.Errno {
	n.volume.Lock()
	defer n.volume.Unlock()
	target := path.Join("/", to.EmbeddedInode().Path(nil), toName)
	return code(n.volume.of.Rename(n.at(name), target))
}
