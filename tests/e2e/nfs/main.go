// An NFS 3 server and a mount helper over FUSE, for the end-to-end tests of charts/shared-storage on a machine whose kernel
// has no NFS client. The helper and the server communicate with NFS 3; Linux's own client is not tested.
//
//	go build -o mount.nfs .                      on the node, as /sbin/mount.nfs, which `mount -t nfs` runs
//	./mount.nfs serve DIRECTORY ADDRESS:PORT     run the server; every user has full access to DIRECTORY
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
		err = errors.New("usage: mount.nfs SERVER:/DIRECTORY TARGET -o OPTIONS, or: mount.nfs serve DIRECTORY ADDRESS:PORT")
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

// options parses `-o a,b=c`.
func options(arguments []string) map[string]string {
	values := map[string]string{}
	for i, argument := range arguments {
		if argument == "-o" && i+1 < len(arguments) {
			for _, option := range strings.Split(arguments[i+1], ",") {
				name, value, _ := strings.Cut(option, "=")
				values[name] = value
			}
		}
	}
	return values
}

// start starts a background process that serves the mount, and waits until the mount is ready.
func start() error {
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	background := exec.Command("/proc/self/exe", os.Args[1:]...)
	background.Env = append(os.Environ(), "NFS_STAYS=1")
	background.ExtraFiles = []*os.File{writer}
	background.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := background.Start(); err != nil {
		return err
	}
	writer.Close()
	message, _ := io.ReadAll(reader)
	if string(message) != "mounted" {
		return errors.New(string(message))
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
		return fail(fmt.Errorf("this helper does not query a portmapper: specify port= (and mountport=)"))
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

// shared serializes the calls on a connection.
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
		return syscall.Errno(refused.ErrorNum) // NFS 3 uses the numbers of Unix
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
	attributes, _, err := n.volume.of.Lookup(name, false)
	if err != nil {
		return nil, code(err)
	}
	of, known := attributes.(*client.Fattr)
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
	var attributes client.Sattr3
	if mode, set := in.GetMode(); set {
		attributes.Mode = client.SetMode{SetIt: true, Mode: mode & 0o7777}
	}
	if size, set := in.GetSize(); set {
		attributes.Size = client.SetSize{SetIt: true, Size: size}
	}
	if err := n.volume.of.Setattr(n.at(""), attributes); err != nil {
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
	listed, err := n.volume.of.ReadDirPlus(n.at(""))
	var entries []fuse.DirEntry
	for _, entry := range listed {
		if entry.FileName != "." && entry.FileName != ".." {
			kind := uint32(syscall.S_IFREG)
			if entry.IsDir() {
				kind = syscall.S_IFDIR
			}
			entries = append(entries, fuse.DirEntry{Name: entry.FileName, Ino: entry.FileId, Mode: kind})
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
	created, failed := n.child(ctx, name, out)
	return created, nil, fuse.FOPEN_DIRECT_IO, failed
}

func (n *node) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0 // each read requests the data from the server
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
