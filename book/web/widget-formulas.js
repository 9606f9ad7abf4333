// html-manager typesets the labels of widgets through MathJax 2's Hub; pages have MathJax 3, which has no Hub.
// Both scripts are there when the page has loaded, and html-manager begins after this.
window.addEventListener("load", () => {
  if (window.MathJax && !MathJax.Hub) {
    MathJax.Hub = { Queue: ([, , element]) => MathJax.typesetPromise([element]) };
  }
});
