import timeit, numpy as np, cupy as cp, torch, fp4kit, ml_dtypes
from fp4kit.cuda import prepared
from fp4kit.libraries import torch_arrays as ta
bf=np.dtype(ml_dtypes.bfloat16)
x=cp.zeros((64,4096),bf); t=torch.zeros((64,4096),dtype=torch.bfloat16,device="cuda")
def tm(name,f,n=2000):
    best=1e9
    for _ in range(7):
        cp.cuda.Device().synchronize(); s=timeit.default_timer()
        for _ in range(n//10):
            f()
        best=min(best,(timeit.default_timer()-s)/(n//10)*1e6)
    print(f"{best:6.2f} {name}")
for lib,a in (("cupy",x),("torch",t)):
    for r in ("mxfp4-ocp","nvfp4-te"):
        q=fp4kit.quantize(a,r); fp4kit.quantize(a,r)
        key,call=prepared.find("quantize",(a,None,None),r,-1,"linear","nearest")
        m=call.memory
        tm(f"{lib} {r} quantize",lambda:fp4kit.quantize(a,r))
        fp4kit.quantize(a,r,out=q); tm(f"{lib} {r} quantize out",lambda:fp4kit.quantize(a,r,out=q))
        tm(" find",lambda:prepared.find("quantize",(a,None,None),r,-1,"linear","nearest"))
        tm(" find out",lambda:prepared.find("quantize",(a,None,q),r,-1,"linear","nearest"))
        tm(" call",lambda:call(a,None,None)); 
        tm(" make",lambda:call.row.make(m,None))
    tm(" empty packed",lambda:m.empty((64,2048),prepared.UINT8)); tm(" empty ()",lambda:m.empty((),prepared.FLOAT32))
    e=m.empty((),prepared.FLOAT32); s=m.stream()
    tm(" stream",lambda:m.stream()); tm(" clear",lambda:m.clear(e,s)); tm(" amax launch",lambda:call.finding(m.address(a),m.address(e),stream=s))
    tm(" address",lambda:m.address_of(e))
tm("getDevice",cp.cuda.runtime.getDevice); tm("torch x*2",lambda:t*2); tm("torch empty",lambda:torch.empty((64,2048),dtype=torch.uint8,device=t.device)); tm("empty_like",lambda:torch.empty_like(t)); tm("new_empty",lambda:t.new_empty((64,2048)))
L=call.launch; args=[0]*11
f=L._function; b=bytearray(104)
tm("raw function",lambda:f(L._grid,L._block,(L._free[0][1],)) if L._free else None)
tm("cupy view",lambda:x[:32]); tm("cupy ndarray memptr",lambda:cp.ndarray((64,2048),np.uint8,memptr=x.data))
tm("x.data.ptr",lambda:x.data.ptr); tm("x.strides",lambda:x.strides); tm("flags", lambda:x.shape)
